"""The page of three real sets has a plain script's numbers: of drawings, drawn scenes, a table with LAION's columns."""

import base64
import gzip
import io
import json
import statistics
from collections import Counter
from contextlib import redirect_stdout
from urllib.parse import urlsplit

import pandas as pd
import pytest
from PIL import Image

from ppldm.cli import main as cli


def command(*words) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        cli.run([str(word) for word in words])
    return printed.getvalue()


def drawings(folder):
    command("demo-data", "--out", folder, "--size", 32, "--limit", 30, "--language", "zh")
    return folder / "demo.filelist.list"


def scenes(folder):
    command("demo-data", "--world", "shapes", "--rows", 40, "--size", 32, "--out", folder)
    return folder / "demo.filelist.list"


def laion(folder):
    """What is published of pictures of the web, with the pictures in it."""
    table = pd.DataFrame(read_parts(scenes(folder / "scenes").parent))
    table = table[["TEXT", "image"]].assign(
        URL=[f"https://host-{number // 2 % 7}.org/{number // 2}.png" for number in range(len(table))],
        aesthetic=[round(4 + number * 0.07, 3) for number in range(len(table))],
        LICENSE=["CC0" if number % 3 else "CC BY 4.0" for number in range(len(table))],
    )
    table.to_parquet(folder / "laion.parquet")
    (folder / "laion.filelist").write_text("laion.parquet\n")
    (folder / "laion.filelist.list").write_text("laion.filelist format=parquet\n")
    return folder / "laion.filelist.list"


def read_parts(folder) -> list[dict]:
    rows = []
    for name in (folder / "demo.filelist").read_text().split():
        for line in gzip.decompress((folder / name).read_bytes()).decode().split("\n")[:-1]:
            caption, meta, image = line.split("\t")[:3]
            rows.append({"TEXT": caption, "image": base64.b64decode(image), **json.loads(meta)})
    return rows


@pytest.mark.parametrize("make", [drawings, scenes, laion])
def test_the_numbers_of_a_real_set_are_those_of_a_plain_script(make, tmp_path):
    data = make(tmp_path)
    printed = command("stats", data, "--html", tmp_path / "page.html", "--num-workers", 1, "--json")
    report, html = json.loads(printed), (tmp_path / "page.html").read_text()
    rows = pd.read_parquet(tmp_path / "laion.parquet").to_dict("records") if make is laion else read_parts(tmp_path)
    captions, pictures = [row["TEXT"] for row in rows], [Image.open(io.BytesIO(row["image"])) for row in rows]
    assert report["rows"] == report["facts"]["captions"] == len(rows) >= 30 and not report["skipped"]
    for name, values in {
        "width": [picture.width for picture in pictures],
        "height": [picture.height for picture in pictures],
        "caption_chars": [len(caption) for caption in captions],
    }.items():
        assert report[name][:: len(report[name]) - 1] == [min(values), max(values)]
        assert report[name][3] in (statistics.median_low(values), statistics.median_high(values))
    repeated = Counter(captions)
    assert report["facts"]["copies"]["caption"]["distinct"] == len(repeated)
    assert report["facts"]["copies"]["caption"]["extra"] == len(rows) - len(repeated)
    if make is laion:
        hosts = Counter(urlsplit(row["URL"]).hostname for row in rows)
        assert report["facts"]["domains"] == hosts and sum(hosts.values()) == len(rows)
        assert report["facts"]["licences"] == Counter(row["LICENSE"] for row in rows)
        scores = report["scores"]["aesthetic"]
        assert scores["rows"] == len(rows) and scores["quantiles"][0] == pytest.approx(4, rel=5e-3)
        assert report["facts"]["copies"]["url"]["extra"] == len(rows) // 2
    assert html.count("data:image") >= len(rows) and f"{len(rows)} rows in" in html
