"""Writers of every format that is read, for tests."""

import bz2
import csv
import gzip
import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ppldm.data.formats.part import write_part


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_tar(path, rows, format=tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=format) as tar:
        for row in rows:
            key = row.meta["key"]
            add_member(tar, f"{key}.png", row.image)
            add_member(tar, f"{key}.txt", row.caption.encode())
            add_member(tar, f"{key}.json", json.dumps(row.meta).encode())
            if row.control:
                add_member(tar, f"{key}.control.png", row.control)


def write_folder(path, rows) -> None:
    path.mkdir(exist_ok=True)
    for row in rows:
        key = row.meta["key"]
        (path / f"{key}.png").write_bytes(row.image)
        (path / f"{key}.txt").write_text(row.caption)
        (path / f"{key}.json").write_text(json.dumps(row.meta))
        if row.control:
            (path / f"{key}.control.png").write_bytes(row.control)


def write_csv(path, rows) -> None:
    folder = path.with_name(f"{path.name}-images")
    write_folder(folder, rows)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        seconds = any(row.control for row in rows)
        writer.writerow(["dir", "text", "key", *["control"] * seconds])
        for row in rows:
            stem = f"{folder.name}/{row.meta['key']}"
            second = f"{stem}.control.png" if row.control else ""
            writer.writerow([f"{stem}.png", row.caption, row.meta["key"], *[second] * seconds])


def write_parquet(path, rows, struct=True) -> None:
    images = [{"bytes": row.image, "path": None} for row in rows] if struct else [row.image for row in rows]
    columns = {"image": images, "text": [row.caption for row in rows], "key": [row.meta["key"] for row in rows]}
    if any(row.control for row in rows):
        columns["conditioning_image"] = [{"bytes": row.control or None} for row in rows]
    pq.write_table(pa.table(columns), path, row_group_size=7)


def write_mds(path, rows, columns=None) -> None:
    """columns: name to (encoding, size, a row's bytes), in the order of their names as the library writes them."""
    if columns is None:
        columns = {
            "caption": ("str", None, lambda row: row.caption.encode()),
            "key": ("str", None, lambda row: row.meta["key"].encode()),
            "png": ("png", None, lambda row: row.image),
        }
        if any(row.control for row in rows):
            columns["control_image"] = ("bytes", None, lambda row: row.control)
    samples = []
    for row in rows:
        values = [(size, encode(row)) for _, size, encode in columns.values()]
        head = np.array([len(value) for size, value in values if size is None], "<u4").tobytes()
        samples.append(head + b"".join(value for _, value in values))
    stated = {
        "column_encodings": [encoding for encoding, _, _ in columns.values()],
        "column_names": list(columns),
        "column_sizes": [size for _, size, _ in columns.values()],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    config = json.dumps(stated, sort_keys=True).encode()
    starts = np.cumsum([0, *map(len, samples)]) + 4 + 4 * (len(samples) + 1) + len(config)
    path.write_bytes(np.array([len(samples), *starts], "<u4").tobytes() + config + b"".join(samples))


# By the suffix that MosaicML's writer gives a compressed shard.
PACK = {
    ".zstd": pa.Codec("zstd").compress,
    ".gz": gzip.compress,
    ".br": pa.Codec("brotli").compress,
    ".bz2": bz2.compress,
    ".snappy": pa.Codec("snappy").compress,
}


def pack_mds(path, suffix: str):
    """A shard's compressed file, which takes its place."""
    packed = path.with_name(path.name + suffix)
    packed.write_bytes(bytes(PACK[suffix](path.read_bytes())))
    path.unlink()
    return packed


# How rows of meta {"key": sorted string} are written, by the name of the format.
WRITERS = {
    "part": write_part,
    "webdataset": write_tar,
    "folder": write_folder,
    "csv": write_csv,
    "parquet": write_parquet,
    "mds": write_mds,
}
