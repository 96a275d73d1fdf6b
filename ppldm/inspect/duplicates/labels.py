"""What is a copy of what, as a table: a row for every row of the filelists, in their order.

OUT/labels.parquet
    part string, row int32      where it is; rows count from 0 in each part
    key string                  of its metadata, where it has one
    sha256 binary[32]           of the image file; missing where it cannot be read
    cluster int64               the same for copies: the number, through all rows, of the one that is kept; missing
                                for rows without copies and for those that cannot be read
    kept bool                   missing for rows that cannot be read
    distance int8               bits between its hash and that of the kept one, 0 for the kept one; by embeddings,
                                hundredths of 1 - cosine similarity
    same_file bool              whether its image file is that of the kept one, byte for byte
OUT/duplicates.jsonl            the key of every row that is not kept, as `ppldm forget --entries` takes it
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...utils.files import atomic_write, read_json
from ...utils.text import NOT_UTF8
from ..parts import Span
from .hash_files import read_hashes

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
    """Labels of rows. of_rows: node of each row, -1 for none; best: the best row of each node; star, distance: of
    nodes; digests: of rows."""
    usable = of_rows >= 0
    cluster = np.where(usable, best[star[of_rows]], -1)
    sizes = np.bincount(cluster[usable], minlength=len(of_rows))
    same = usable & (digests == digests[cluster])
    copies = np.where(usable, sizes[cluster], 0).astype(np.int32)
    return Labels(cluster, np.where(usable, distance[of_rows], 0).astype(np.int8), same, copies)


def write_labels(out: Path, spans: Iterable[tuple[Span, Path]], labels: Labels) -> None:
    """Write both files. spans: those of all rows, in order, with the files of their hashes."""
    start = 0
    sources = {}
    with (
        atomic_write(out / "labels.parquet") as file,
        pq.ParquetWriter(file, _SCHEMA) as writer,
        atomic_write(out / "duplicates.jsonl", "w", encoding="utf-8", errors=NOT_UTF8) as listing,
    ):
        for span, path in spans:
            table, stop = read_hashes(path, ("key", "sha256")), start + span.stop - span.start
            own = slice(start, stop)
            usable, alone = labels.cluster[own] >= 0, labels.copies[own] < 2
            kept = labels.cluster[own] == np.arange(start, stop)
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
            start = stop


def _place_of(part: Path, sources: dict[Path, dict[str, str]]) -> str:
    """What stands before a key, so that it names one row: the source of a part that `ppldm convert` wrote."""
    data = part.parent.parent
    if data not in sources:
        manifest = read_json(data / "manifest.json")
        parts = manifest.get("parts", []) if isinstance(manifest, dict) else []
        sources[data] = {Path(entry["path"]).name: entry.get("source", "") for entry in parts}
    source = sources[data].get(part.name, "")
    return f"{source}/" if source not in ("", ".") and not source.startswith("*") else ""
