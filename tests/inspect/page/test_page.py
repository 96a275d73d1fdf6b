"""`ppldm stats --html`: the numbers of a plain script over the same rows, on a page that loads nothing."""

import io
import json
import re
from contextlib import redirect_stdout
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import pytest
from browser import browser
from PIL import Image

from ppldm.cli import main as cli
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.inspect import measure as facts
from ppldm.inspect.measure import Facts
from ppldm.utils.errors import ConfigError, OutputError
from ppldm.utils.files import write_json

HOSTILE = "<script>alert('x')</script>&<img src=http://example.org/x.png> \u202e the"
TEXTS = ("the cat on a mat", "ein Hund und eine Katze", "红色的心", HOSTILE, "Canon EOS 5D")


def png(size) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def make_rows(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        meta = {
            "key": f"{number % (count - 5):04}",
            "sha256": f"{number // 2:064x}",
            "url": f"https://{'www.' * (number % 2)}host-{int(rng.integers(30))}.org/{number % 17}.jpg",
            "aesthetic": round(float(rng.normal(6, 1)), 6),
            "hash": int(rng.integers(2**62)),
            "license": ("CC0", "CC BY 4.0")[number % 7 == 0],
            "LANGUAGE": "en",
        }
        if number % 11 == 0:
            del meta["aesthetic"], meta["url"]
        rows.append(Row(TEXTS[number % 5], png((16 + number % 9, 24)), meta))
    return rows


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, good rows, report): 90 rows of a conversion in two parts, five of them bad, and a run on them."""
    folder = tmp_path_factory.mktemp("page")
    good, bad = make_rows(90), (7, 8, 33, 60, 61)
    written = [Row(row.caption, row.image[:50] if n in bad else row.image, row.meta) for n, row in enumerate(good)]
    (folder / "out/parts").mkdir(parents=True)
    write_part(folder / "out/parts/part-00000.gz", written[:50])
    write_part(folder / "out/parts/part-00001.gz", written[50:])
    (folder / "out/all.filelist").write_text("parts/part-00000.gz\nparts/part-00001.gz\n")
    manifest = {"rows_in": 100, "rows_out": 90, "skipped": {"image": 6, "not_downloaded": 3, "forgotten": 1}}
    write_json(folder / "out/manifest.json", manifest | {"parts": [{"path": "parts/part-00000.gz", "bytes": 5}]})
    (folder / "run").mkdir()
    line = {"global_step": 40, "images_per_second": 8.0, "avg_batch_cost": 0.5, "skipped_rows": 3}
    (folder / "run/metrics.jsonl").write_text(json.dumps(line | {"skipped_rows_image": 3}) + "\n")
    for name, words in (("few", ["the", "cat"]), ("many", ["the", "cat", "on", "a", "mat", "ein", "hund"])):
        (folder / name).mkdir()
        (folder / name / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    tokenizers = ("--tokenizer", folder / "few", folder / "many", "--max-length", 6)
    shapes = ("--settings", "resolution=16", "bucket_step=8")
    report = report_of(folder, *tokenizers, *shapes, "--records", folder / "run")
    return folder, [row for number, row in enumerate(good) if number not in bad], report


def report_of(folder, *flags) -> dict:
    """What the command prints."""
    words = ["stats", folder / "out/all.filelist", "--html", folder / "page.html", "--num-workers", 1, "--json"]
    words += flags
    with redirect_stdout(io.StringIO()) as printed:
        cli.run([str(word) for word in words])
    return json.loads(printed.getvalue())


def test_the_numbers_are_those_of_a_plain_script(made):
    _, rows, report = made
    table = pd.DataFrame([row.meta | {"caption": row.caption} for row in rows])
    found = report["facts"]
    assert found["looked"] == found["captions"] == len(table) == 85
    hosts = table["url"].dropna().map(lambda url: urlsplit(url).hostname.removeprefix("www."))
    counted = hosts.value_counts()
    assert found["different"]["domains"] == counted.size > len(found["domains"]) == 20
    assert all(counted[name] == number for name, number in found["domains"].items())
    assert list(found["domains"].values()) == counted.tolist()[:20]
    assert found["licences"] == table["license"].value_counts().to_dict()
    assert found["said"] == {"en": 85}
    by_text = dict(zip(TEXTS, ("en", "de", "zh", "en", "other Latin"), strict=True))
    assert found["languages"] == table["caption"].map(by_text).value_counts().to_dict()
    assert found["fields"] == table.drop(columns="caption").count().to_dict()
    for name in ("key", "sha256", "url", "caption"):
        counts = table[name].value_counts()
        wanted = {"rows": int(counts.sum()), "distinct": counts.size, "repeated": int((counts > 1).sum())}
        wanted |= {"extra": int(table[name].dropna().duplicated().sum()), "sampled_share": 1}
        assert found["copies"][name] == wanted
    ((name, scores),) = report["scores"].items()
    ordered = table["aesthetic"].dropna().sort_values()
    shares = [ordered.iloc[round(share * (len(ordered) - 1))] for share in report["quantiles"]]
    assert (name, scores["rows"]) == ("aesthetic", len(ordered))
    assert scores["quantiles"] == pytest.approx(shares, rel=5e-3)


def test_the_way_of_the_rows_adds_up(made):
    way = made[2]["way"]
    assert all(step["rows_in"] == step["rows_out"] + sum(step["dropped"].values()) for step in way)
    assert [(step["name"], step["rows_in"], step["rows_out"]) for step in way] == [
        ("convert", 97, 90),
        ("read", 90, 85),
        ("train", 163, 160),
    ]
    assert way[0]["dropped"] == {"image": 6, "forgotten": 1} and way[1]["dropped"] == {"image": 5}


def test_the_page_loads_nothing_and_shows_words_as_words(made):
    folder, _, report = made
    html = (folder / "page.html").read_text()
    links = re.findall(r"""(?:src|href|srcset|action)\s*=\s*["']([^"']*)""", html) + re.findall(r"url\(([^)]*)", html)
    assert not [one for one in links if not one.startswith(("data:", "#"))] and "default-src 'none'" in html
    assert "<script" not in html and "&lt;script&gt;" in html and "\u202e" not in html
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert (
        html.count("<svg") > 1 and len(ids) == len(set(ids)) and set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)
    )
    assert html.count('alt=""') == 85 and html.count('class="caption none"') == 5  # of 90 rows
    for counts in (report["facts"]["domains"], report["facts"]["languages"]):
        for name, number in counts.items():
            assert re.search(rf"<td>{re.escape(name)}</td>.{{0,99}}?>{number}</td>", html, re.DOTALL), name
    for words in ("90 rows in 2 parts, 85 of them good", "convert: 97 in, 90 out", "16 x 16, 3"):
        assert words in html


def test_captions_that_are_cut_by_each_tokenizer(made):
    folder, rows, report = made
    assert [one["tokenizer"] for one in report["tokens"]] == [str(folder / "few"), str(folder / "many")]
    # "the cat on a mat" has 5 words and two special tokens, "ein Hund und eine Katze" as many.
    lengths = {text: len(re.findall(r"[一-鿿]|\w+|[^\w\s]", text)) + 2 for text in TEXTS[:3] + TEXTS[4:]}
    cut = sum(lengths.get(row.caption, 99) > 6 for row in rows)
    assert [one["cut"] for one in report["tokens"]] == [cut, cut]
    assert report["tokens"][0]["unknown_share"] > report["tokens"][1]["unknown_share"] > 0
    assert f"few: {cut} of 85 captions" in (folder / "page.html").read_text()


def test_of_many_rows_every_so_manieth_is_looked_at(made, monkeypatch):
    monkeypatch.setattr("ppldm.inspect.measure.MOST_ROWS", 40)
    html = (made[0] / "page.html").read_text()
    found = report_of(made[0])["facts"]
    again = (made[0] / "page.html").read_text()
    (made[0] / "page.html").write_text(html)
    assert found["looked"] == len([n for n in (*range(0, 50, 3), *range(50, 90, 3)) if n not in (7, 8, 33, 60, 61)])
    assert found["copies"]["sha256"]["rows"] == 85
    assert "one row in 3 of each part" in again and "one row in" not in html and "No tokenizer was named" in again


def test_a_page_of_parts_none_of_which_can_be_opened(made, tmp_path):
    (tmp_path / "a.gz").write_bytes(b"\xff\xfe")
    (tmp_path / "a.filelist").write_text("a.gz\n")
    with redirect_stdout(io.StringIO()) as printed:
        cli.run(["stats", str(tmp_path / "a.filelist"), "--html", str(tmp_path / "page.html"), "--json"])
    assert json.loads(printed.getvalue())["shapes"]["error"].startswith("no part can be opened")
    assert "a.gz" in (tmp_path / "page.html").read_text().partition("<body>")[2].partition("<footer>")[0]


def test_numbers_that_are_none():
    found = Facts()
    row = Row("a", b"", {"a": float("nan"), "b": True, "c": 10**400, "d": None, "e": "1.5", "f": 3, "g": -2.5})
    found.add(0, row, ["a"])
    assert {name: dict(values) for name, values in found.scores.items()} == {"f": {3: 1}, "g": {-2.5: 1}}
    assert list(found.shown_scores) == ["g"]


def test_what_cannot_be_on_a_page(made, run):
    folder, flags = made[0], ("--num-workers", 1)
    with pytest.raises(ConfigError, match="without --html"):
        run("stats", folder / "out/all.filelist", "--records", folder / "run")
    with pytest.raises(ConfigError, match="nowhere holds no records"):
        run("stats", folder / "out/all.filelist", "--html", "x.html", "--records", "nowhere", *flags)
    with pytest.raises(OutputError):
        run("stats", folder / "out/all.filelist", "--html", folder)
    assert facts.top({"b": 1, "a": 1, "c": 2}) == {"c": 2, "a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.needs("browser")
def test_a_browser_shows_all_of_it_and_asks_nobody(made, here):
    for width in (1280, 375):
        with browser(width, 900, here / "profile") as shown:
            shown.open((made[0] / "page.html").as_uri())
            assert shown.run("return document.documentElement.scrollWidth") == width
            assert shown.run("return performance.getEntriesByType('resource').length") == 0
            assert shown.run("return [...document.images].every(one => one.complete && one.naturalWidth > 0)")
            assert shown.run("return document.querySelectorAll('svg').length") == 10
