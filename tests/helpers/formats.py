"""Writers of every format that is read, for tests."""

import csv
import io
import json
import tarfile

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


def write_folder(path, rows) -> None:
    path.mkdir(exist_ok=True)
    for row in rows:
        key = row.meta["key"]
        (path / f"{key}.png").write_bytes(row.image)
        (path / f"{key}.txt").write_text(row.caption)
        (path / f"{key}.json").write_text(json.dumps(row.meta))


def write_csv(path, rows) -> None:
    folder = path.with_name(f"{path.name}-images")
    write_folder(folder, rows)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["dir", "text", "key"])
        for row in rows:
            writer.writerow([f"{folder.name}/{row.meta['key']}.png", row.caption, row.meta["key"]])


def write_parquet(path, rows, struct=True) -> None:
    images = [{"bytes": row.image, "path": None} for row in rows] if struct else [row.image for row in rows]
    columns = {"image": images, "text": [row.caption for row in rows], "key": [row.meta["key"] for row in rows]}
    pq.write_table(pa.table(columns), path, row_group_size=7)


# How rows of meta {"key": sorted string} are written, by the name of the format.
WRITERS = {
    "part": write_part,
    "webdataset": write_tar,
    "folder": write_folder,
    "csv": write_csv,
    "parquet": write_parquet,
}
