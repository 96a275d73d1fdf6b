"""Which pictures of many are copies of which, given how near they are: stars around the best ones.

Rows of the same file are one node; nodes are numbered by rank, the best first. From the best node on, each is kept
unless it is near to a better one that is kept. So no two kept nodes are near each other, and every other one is near to
the one that stands for it. (Components would also join a chain, so that one picture would stand for others that are not
like it. How many such chains there are is counted.)

By embeddings, pictures are near whose cosine similarity, by a network of `ppldm embed`, is at least a bound. That is
exact, in rows x kept x dim multiplications, without a list of pairs; the embeddings are held, 2 bytes a number.

OUT/labels.parquet, a row for every row of the filelists, in their order
    part string, row int32      where it is; rows count from 0 in each part
    key string                  of its metadata, where it has one
    sha256 binary[32]           of the image file; missing where it cannot be read
    cluster int64               of copies, the number, through all rows, of the one that is kept; missing for others
    kept bool                   missing for rows that cannot be read
    distance int8               bits between its hash and the kept one's, 0 for the kept one; by embeddings,
                                hundredths of 1 - cosine similarity
    same_file bool              whether its image file equals the kept one's, byte for byte
OUT/duplicates.jsonl            the key of every row that is not kept, as `ppldm forget --entries` takes it
"""

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...utils.errors import ConfigError, DataError
from ...utils.files import atomic_write, read_json
from ...utils.log import progress
from ...utils.text import NOT_UTF8
from ..parts import Indexed, open_rows
from .hashes import Hashed

KEEP_RULES = ("largest", "longest_caption", "first")
_SCHEMA = pa.schema(
    {
        "part": pa.dictionary(pa.int32(), pa.string()),
        "row": pa.int32(),
        "key": pa.string(),
        "sha256": pa.binary(32),
        "cluster": pa.int64(),
        "kept": pa.bool_(),
        "distance": pa.int8(),
        "same_file": pa.bool_(),
    }
)
_BLOCK, _KEPT_AT_ONCE = 1024, 16384
HUNDREDTHS = 100  # distances are 1 - similarity in hundredths, which fit the labels


@dataclass(frozen=True)
class Nodes:
    """`of_rows`: int32 [rows], each row's node, -1 for an unusable one. `rows`: int64 [nodes], the best row of each."""

    of_rows: np.ndarray
    rows: np.ndarray


def parse_keep(text: str) -> list[str]:
    """The rules of --keep, the first first. Raises ConfigError."""
    rules = text.split(",")
    if unknown := [rule for rule in rules if rule not in KEEP_RULES]:
        raise ConfigError(f"--keep: {unknown[0]!r} is not a rule; write some of {','.join(KEEP_RULES)}")
    return rules


def rank_rows(rules: list[str], pixels: np.ndarray, caption_chars: np.ndarray) -> np.ndarray:
    """int64 [rows]: the rows from the best to the worst; by their order where the rules say nothing else."""
    by_rule = {"largest": -pixels, "longest_caption": -caption_chars, "first": np.arange(len(pixels))}
    return np.lexsort([by_rule[rule] for rule in reversed([*rules, "first"])])


def make_nodes(ranked: np.ndarray, usable: np.ndarray, digests: np.ndarray) -> Nodes:
    """Nodes of rows. ranked: the rows by rank. usable: bool [rows]. digests: [rows], of their files."""
    rows = ranked[usable[ranked]]
    _, first, group = np.unique(digests[rows], return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(first), np.int32)
    number[order] = np.arange(len(first), dtype=np.int32)
    of_rows = np.full(len(ranked), -1, np.int32)
    of_rows[rows] = number[group]
    return Nodes(of_rows, rows[first[order]])


def choose_stars(
    num_nodes: int, better: np.ndarray, worse: np.ndarray, bits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [nodes], the kept node that stands for each, itself where it is kept; int8 [nodes], its bits from that) of
    near pairs of nodes, each once, `better` having the lower number."""
    undecided, kept = np.ones(num_nodes, bool), np.zeros(num_nodes, bool)
    left_better, left_worse = better, worse
    while undecided.any():
        waiting = np.zeros(num_nodes, bool)
        waiting[left_worse] = True
        now = undecided & ~waiting
        kept |= now
        undecided[now] = False
        undecided[left_worse[now[left_better]]] = False
        left = undecided[left_better] & undecided[left_worse]
        left_better, left_worse = left_better[left], left_worse[left]
    star, distance = np.arange(num_nodes, dtype=np.int32), np.zeros(num_nodes, np.int8)
    of_kept = kept[better]
    better, worse, bits = better[of_kept], worse[of_kept], bits[of_kept]
    order = np.lexsort((better, bits, worse))
    found, first = np.unique(worse[order], return_index=True)
    star[found], distance[found] = better[order][first], bits[order][first]
    return star, distance


def count_chains(star: np.ndarray, better: np.ndarray, worse: np.ndarray) -> int:
    """Components of near nodes that more than one star was made of."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    size = len(star)
    count, component = connected_components(coo_array((np.ones(len(better), bool), (better, worse)), (size, size)))
    kept = star == np.arange(size)
    return int((np.bincount(component[kept], minlength=count) > 1).sum())


@dataclass(frozen=True)
class Labels:
    """Of every row: `cluster`, int64, the row that stands for it, -1 where it cannot be used; `distance`, int8;
    `same_file`, bool; `copies`, int32: rows of its cluster."""

    cluster: np.ndarray
    distance: np.ndarray
    same_file: np.ndarray
    copies: np.ndarray

    @property
    def dropped(self) -> np.ndarray:
        """bool [rows]: copies that are not the kept one."""
        return (self.cluster >= 0) & (self.cluster != np.arange(len(self.cluster)))


def make_labels(of_rows: np.ndarray, best: np.ndarray, star, distance, digests: np.ndarray) -> Labels:
    """Labels of rows. of_rows: each row's node, -1 for none; best: each node's best row; digests: of rows."""
    usable = of_rows >= 0
    cluster = np.where(usable, best[star[of_rows]], -1)
    sizes = np.bincount(cluster[usable], minlength=len(of_rows))
    same = usable & (digests == digests[cluster])
    copies = np.where(usable, sizes[cluster], 0).astype(np.int32)
    return Labels(cluster, np.where(usable, distance[of_rows], 0).astype(np.int8), same, copies)


def write_labels(out: Path, hashed: Iterable[Hashed], labels: Labels) -> None:
    sources = {}
    with (
        atomic_write(out / "labels.parquet") as file,
        pq.ParquetWriter(file, _SCHEMA) as writer,
        atomic_write(out / "duplicates.jsonl", "w", encoding="utf-8", errors=NOT_UTF8) as listing,
    ):
        for one in hashed:
            table, span, own = one.read(("key", "sha256")), one.span, one.rows
            usable, alone = labels.cluster[own] >= 0, labels.copies[own] < 2
            kept = labels.cluster[own] == np.arange(own.start, own.stop)
            columns = {
                "part": pa.DictionaryArray.from_arrays(np.zeros(len(kept), np.int32), [str(span.part.path)]),
                "row": pa.array(np.arange(span.start, span.stop, dtype=np.int32)),
                "key": table["key"].combine_chunks(),
                "sha256": table["sha256"].combine_chunks(),
                "cluster": pa.array(labels.cluster[own], mask=alone),
                "kept": pa.array(kept, mask=~usable),
                "distance": pa.array(labels.distance[own], mask=~usable),
                "same_file": pa.array(labels.same_file[own], mask=~usable),
            }
            writer.write_table(pa.table(columns, schema=_SCHEMA))
            dropped = np.flatnonzero(usable & ~kept)
            if len(dropped):
                place = _place_of(span.part.path, sources)
                keys = table["key"].take(dropped).to_pylist()
                listing.writelines(json.dumps({"key": place + key}) + "\n" for key in keys if key)


def _place_of(part: Path, sources: dict[Path, dict[str, str]]) -> str:
    """What stands before a key, so that it names one row: the source of a part that `ppldm convert` wrote."""
    data = part.parent.parent
    if data not in sources:
        manifest = read_json(data / "manifest.json")
        parts = manifest.get("parts", []) if isinstance(manifest, dict) else []
        sources[data] = {Path(entry["path"]).name: entry.get("source", "") for entry in parts}
    source = sources[data].get(part.name, "")
    return f"{source}/" if source not in ("", ".") and not source.startswith("*") else ""


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
    in hundredths) of embeddings [nodes, dim] of length 1, the best node first. A node is kept unless its similarity to
    a better one that is kept is at least `least`; it goes to the most similar of these, of equals to the best."""
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
