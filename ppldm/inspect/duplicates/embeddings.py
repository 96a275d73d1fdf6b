"""Copies by embeddings: pictures whose cosine similarity, by a network of `ppldm embed`, is at least a bound.

Exact, and in bounded memory: from the best picture on, blocks are multiplied with the embeddings of the pictures that
are kept so far, and with themselves. That takes rows x kept x dim multiplications and no list of pairs, however many
there are; the embeddings themselves are held, 2 bytes a number.
"""

from contextlib import closing
from pathlib import Path

import numpy as np

from ...utils.errors import ConfigError, DataError
from ...utils.files import read_json
from ...utils.log import progress
from ..parts import Indexed, open_rows

_BLOCK, _KEPT_AT_ONCE = 1024, 16384
HUNDREDTHS = 100  # distances are 1 - similarity in hundredths, which fit the labels


def read_embeddings(folder: Path, indexed: Indexed) -> np.ndarray:
    """float16 [rows, dim] of all rows, of length 1, or zeros where there is none. Raises ConfigError, DataError."""
    told = read_json(folder / "embeddings.json")
    if told is None:
        raise ConfigError(
            f"--embeddings {folder} has no embeddings.json; name a folder that `ppldm embed` has finished"
        )
    files = {tuple(part["identity"]): part for part in told["parts"]}
    found = np.zeros((indexed.num_rows, told["dim"]), np.float16)
    start = 0
    for part, rows in indexed.rows.items():
        with closing(open_rows(part)) as opened:
            known = files.get(tuple(opened.identity))
        if known is None:
            raise DataError(f"--embeddings {folder} are not of {part.path} as it is now; run `ppldm embed` again")
        found[start : start + rows] = np.load(folder / known["file"])
        start += rows
    return found


def find_stars(embeddings: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [nodes], the kept node that stands for each, itself where it is kept; int8 [nodes], its distance from that
    in hundredths).

    embeddings: [nodes, dim] of length 1, the best node first. A node is kept unless its similarity to a better one that
    is kept is at least `least`; it goes to the most similar of these, of equals to the best.
    """
    count = len(embeddings)
    star, nearest = np.arange(count, dtype=np.int32), np.ones(count, np.float32)
    kept = np.zeros(0, np.int32)
    with progress(total=count, desc="comparing", unit="row", delay=3) as bar:
        for start in range(0, count, _BLOCK):
            block = embeddings[start : start + _BLOCK].astype(np.float32)
            best, where = _compare(block, embeddings, kept)
            among = block @ block.T
            is_kept = np.zeros(len(block), bool)
            for i in range(len(block)):
                if is_kept[:i].any():
                    own = np.where(is_kept[:i], among[i, :i], -1)
                    j = int(own.argmax())
                    if own[j] > best[i]:
                        best[i], where[i] = own[j], start + j
                is_kept[i] = best[i] < least
            dropped = np.flatnonzero(~is_kept)
            star[start + dropped], nearest[start + dropped] = where[dropped], best[dropped]
            kept = np.concatenate([kept, start + np.flatnonzero(is_kept).astype(np.int32)])
            bar.update(len(block))
    return star, np.clip(np.rint(HUNDREDTHS * (1 - nearest)), 0, HUNDREDTHS).astype(np.int8)


def _compare(block: np.ndarray, embeddings: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(similarity of each row of a block to the most similar kept node, which that is); -1 where none is kept."""
    best, where = np.full(len(block), -1, np.float32), np.zeros(len(block), np.int32)
    for first in range(0, len(kept), _KEPT_AT_ONCE):
        chunk = kept[first : first + _KEPT_AT_ONCE]
        found = block @ embeddings[chunk].astype(np.float32).T
        j = found.argmax(axis=1)
        similarity = found[np.arange(len(block)), j]
        better = similarity > best
        best[better], where[better] = similarity[better], chunk[j[better]]
    return best, where
