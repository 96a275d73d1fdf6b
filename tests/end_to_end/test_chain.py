"""From metadata to training, over a web that misbehaves: every row is accounted for at every stage."""

import base64
import csv
import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import web
from filelists import read_filelist
from trained_here import train_here

from ppldm.data.filelist import read_filelist_list
from ppldm.data.formats.part import Part
from ppldm.data.images import decode_pixels
from ppldm.prepare.pipeline import pipeline

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def make_rows(server) -> tuple[list[dict], Counter]:
    """Rows of metadata, and how many of them should fail by class of failure."""
    good = [f"good/{number}.jpg" for number in range(40)] + [*web.PICTURES, "redirect"]
    bad = {server.url(path): name for path, name in web.FAILURES.items()}
    bad |= {
        "http://nowhere.invalid/a.jpg": "dns",
        "http://127.0.0.1:9/closed.jpg": "refused",
        f"https://127.0.0.1:{server.server_port}/good/1.jpg": "tls",
        "file:///etc/hostname": "bad_url",
    }
    urls = [server.url(path) for path in good] + list(bad)
    rows = [{"url": url, "caption": f'picture {number}, "so to say"'} for number, url in enumerate(urls)]
    rows[0]["caption"] = "two\nlines\tand a tab"
    rows[1]["caption"] = "  "  # downloaded, and left out by the converter
    return rows, Counter(bad.values())


def write_laion2b(path: Path, rows: list[dict]) -> int:
    """The schema of LAION2B-en's aesthetic subset, with rows that the filter drops; returns their number."""
    table = [
        {"URL": row["url"], "TEXT": row["caption"], "WIDTH": 640.0, "HEIGHT": 512.0, "similarity": 0.3, "punsafe": 0.98,
         "pwatermark": 0.1, "AESTHETIC_SCORE": 4.5, "hash": number, "__index_level_0__": number}
        for number, row in enumerate(rows)
    ]  # fmt: skip
    changes = ({"WIDTH": 511.0}, {"HEIGHT": None}, {"punsafe": 0.99}, {"AESTHETIC_SCORE": 4.4})
    table += [table[0] | change for change in changes]
    pq.write_table(pa.Table.from_pylist(table), path)
    return len(changes)


def write_laion_art(path: Path, rows: list[dict]) -> int:
    """The schema of LAION-Art, likewise."""
    table = [
        {"URL": row["url"], "TEXT": row["caption"], "WIDTH": 640, "HEIGHT": 512, "similarity": 0.3, "LANGUAGE": "en",
         "hash": number, "pwatermark": 0.1, "punsafe": 0.1, "aesthetic": 8.5}
        for number, row in enumerate(rows)
    ]  # fmt: skip
    changes = ({"WIDTH": 511}, {"HEIGHT": 100}, {"LANGUAGE": "nolang"}, {"LANGUAGE": None})
    table += [table[0] | change for change in changes]
    pq.write_table(pa.Table.from_pylist(table), path)
    return len(changes)


def run(*command) -> subprocess.CompletedProcess:
    path = f"{ROOT / 'tests/helpers/resolver'}{os.pathsep}{ROOT}"
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    "write, preset, output_format",
    [
        (write_laion2b, "laion2b-en", "files"),
        (write_laion_art, "laion-art", "webdataset"),
        (write_laion_art, "laion-art", "parquet"),
    ],
)
def test_from_metadata_to_training(tiny, tmp_path, capsys, write, preset, output_format):
    config = tmp_path / "pipeline.yaml"
    annotate = "annotate: {}\n" if output_format == "files" else ""
    config.write_text(
        f"out: out\nmetadata: metadata.parquet\nfilter: {{preset: {preset}, num_partitions: 2}}\n"
        f"download: {{image_size: 64, output_format: {output_format}, processes_count: 2, thread_count: 16, timeout: 1,"
        f" url_seconds: 2, max_bytes: 1000000, preflight: 20, refuse_private: false}}\n"
        f"{annotate}convert: {{rows_per_part: 16}}\n"
    )
    with web.serve() as server:
        rows, failures = make_rows(server)
        num_dropped = write(tmp_path / "metadata.parquet", rows)
        done = run("-m", "ppldm", "pipeline", config, "--json")
        assert done.returncode == 0, done.stderr
        if annotate:
            hits = server.hits.total()
            pipeline(str(config), json=True)
            assert capsys.readouterr().out == done.stdout and server.hits.total() == hits
    report = json.loads(done.stdout)
    stages, num_good = report["stages"], len(rows) - failures.total()
    assert stages["filter"]["rows_in"] == len(rows) + num_dropped and stages["filter"]["rows_out"] == len(rows)
    assert stages["download"]["rows_in"] == len(rows) and stages["download"]["rows_out"] == num_good
    assert stages["download"]["dropped"] == failures
    assert stages["convert"]["rows_out"] == num_good - 1 and stages["convert"]["dropped"]["empty_caption"] == 1
    for stage in stages.values():
        assert stage["rows_in"] == stage["rows_out"] + sum(stage["dropped"].values())

    check_parts(report["file_list"], rows, num_good - 1)
    if annotate:
        check_annotations(tmp_path / "out/images", num_good - 1)
    if output_format == "parquet":
        return  # the parts are trained on twice already
    train_here(tiny.flags(tmp_path / "run", file_list=report["file_list"], max_steps=3))
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 3 and all(np.isfinite(record["loss"]) for record in records)


def check_parts(file_list: str, rows: list[dict], num_rows: int) -> None:
    """Captions and pictures are those of the source, by the plain reader and by our own; each row knows its URL."""
    captions = {row["url"]: row["caption"] for row in rows}
    parts = [part for item in read_filelist_list(file_list) for part in read_filelist(item.path)]
    seen = set()
    for path in parts:
        part = Part(path)
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            lines = [line.rstrip("\n").split("\t")[:3] for line in file]
        assert len(lines) == len(part)
        for number, (caption, _, encoded) in enumerate(lines):
            row = part.read(number)
            assert (row.caption, row.image) == (caption, base64.b64decode(encoded))
            url = row.meta["url"]
            assert caption == " ".join(captions[url].split())
            path_of_url = url.split("/", 3)[3]
            if path_of_url.startswith("good/"):
                assert row.image == web.encode(web.picture(int(Path(url).stem)))
            elif path_of_url in ("cmyk.jpg", "grey.jpg", "turned-small.jpg", "wrong-type.jpg"):
                assert row.image == web.PICTURES[path_of_url]
            elif path_of_url == "16bit.png":
                assert 120 < decode_pixels(row.image).mean() < 135
            elif path_of_url == "turned.jpg":
                assert decode_pixels(row.image).shape[:2] == (80, 64)
            seen.add(url)
    assert len(seen) == num_rows == sum(len(Part(path)) for path in parts)


def check_annotations(images: Path, num_rows: int) -> None:
    lines = []
    for path in images.glob("part_*.csv"):
        with open(path, newline="", encoding="utf-8") as file:
            lines += list(csv.DictReader(file))
    assert len(lines) == num_rows and all((images / line["dir"]).is_file() for line in lines)
