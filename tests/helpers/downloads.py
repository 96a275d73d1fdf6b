"""Metadata to download, and what `ppldm download` makes of it."""

import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ppldm.prepare.convert.reencode import Resizer
from ppldm.prepare.download.fetch import FetchSettings
from ppldm.prepare.download.shard import ShardSettings

SETTINGS = {
    "processes_count": 2, "thread_count": 16, "number_sample_per_shard": 50, "timeout": 1.0, "url_seconds": 2.0,
    "max_bytes": 10**6, "image_size": 64, "preflight": 0, "json": True,
    "refuse_private": False,
}  # fmt: skip

SHARD_SETTINGS = ShardSettings(
    fetch=FetchSettings(5, 0, 10, 10**6, refuse_private=False), resizer=Resizer(), output_format="files",
    columns=("hash",), number_sample_per_shard=10, thread_count=4, shard_seconds=60,
)  # fmt: skip


def write_metadata(path: Path, urls, **columns) -> Path:
    captions = [f'caption {number}, "quoted"\nand on' for number in range(len(urls))]
    pq.write_table(pa.table({"URL": urls, "TEXT": captions, "hash": range(len(urls)), **columns}), path)
    return path


def read_rows(folder: Path) -> list[dict]:
    """The rows of all shards' parquet files."""
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def read_images(folder: Path, output_format: str) -> dict[str, bytes]:
    """The pictures by key, wherever the format has them."""
    if output_format == "files":
        return {path.stem: path.read_bytes() for path in folder.glob("*/*.jpg")}
    if output_format == "parquet":
        return {row["key"]: row["jpg"] for row in read_rows(folder) if row["jpg"] is not None}
    images = {}
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            images |= {m.name[:-4]: tar.extractfile(m).read() for m in tar if m.name.endswith(".jpg")}
    return images
