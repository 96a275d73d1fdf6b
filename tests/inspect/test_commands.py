import gzip
import io
import json
from base64 import b64encode
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from ppldm.data.filelist import read_sources
from ppldm.data.formats.part import Part
from ppldm.data.formats.row import encode_row
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inspect.measure import draw_histogram, draw_reasons, quantiles
from ppldm.inspect.show import choose_rows, fit_image
from ppldm.utils.errors import ConfigError, DataError, OutputError, PpldmError


def report_of(run, capsys, *words):
    """The JSON of a command that finds something bad, and its error."""
    with pytest.raises(DataError) as caught:
        run(*words, "--json")
    return json.loads(capsys.readouterr().out), str(caught.value)


def test_index_builds_what_is_missing_and_names_what_cannot_be_opened(data, run, capsys):
    assert json.loads(run("index", "all.list", "--json")) == {"parts": 3, "rows": 30, "bad_parts": {}}
    assert (data / "c.tar.idx").exists()
    columns = sorted(data.glob("*.columns"))
    for path in columns:
        path.unlink()
    run("index", "all.list")
    assert sorted(data.glob("*.columns")) == columns != []
    (data / "b.gz").write_text("no part")
    (data / "a.gz").unlink()
    report, error = report_of(run, capsys, "index", "all.list", "--num-workers", "2")
    assert report["rows"] == 8 and set(report["bad_parts"]) == {"a.gz", "b.gz"}
    assert error.startswith("2 of 3 parts")


@pytest.mark.parametrize("workers", [1, 2])
def test_verify_accounts_for_every_row(data, run, capsys, workers):
    report, error = report_of(run, capsys, "verify", "all.list", "--num-workers", workers, "--out", "good.filelist")
    assert (report["rows"], report["ok"], report["skipped"]) == (30, 27, {"empty_caption": 1, "image": 2})
    assert report["examples"]["image"][0].startswith("b.gz row 3") and "\n" not in error
    assert (data / "good.filelist").read_text() == f"{data / 'a.gz'}\n"
    good = json.loads(run("verify", "good.filelist", "--json"))
    assert (good["rows"], good["ok"], good["skipped"]) == (10, 10, {})


def test_verify_finds_missing_and_broken_parts(data, run, capsys):
    (data / "a.gz").unlink()
    (data / "b.gz").write_bytes((data / "b.gz").read_bytes()[:-20])
    report, _ = report_of(run, capsys, "verify", "parts.filelist", "--out", "good.filelist")
    assert report["rows"] == 0 and set(report["bad_parts"]) == {"a.gz", "b.gz"}
    assert not (data / "good.filelist").exists()


def test_stats_count_what_is_there(data, run):
    report = json.loads(run("stats", "all.list", "--out", "s.png", "--json"))
    assert report["rows"] == 30 and report["skipped"] == {"image": 2, "empty_caption": 1}
    assert report["width"][0] == 20 and report["width"][-1] == 49 and set(report["height"]) == {30}
    assert set(report["caption_words"]) == {2}
    assert Image.open(data / "s.png").size == (1300, 650)
    assert "picture" not in run("stats", "all.list") and "30 rows in 3 part(s)" in run("stats", "all.list")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200))
def test_quantiles_are_those_of_the_sorted_values(values):
    found = quantiles(Counter(values))
    ordered = sorted(values)
    assert found[0] == ordered[0] and found[-1] == ordered[-1]
    assert found[3] == ordered[round(0.5 * (len(values) - 1))]


def test_reasons_of_bad_rows_are_bars_the_most_frequent_on_top():
    axis = Figure().subplots()
    draw_reasons(axis, Counter(image=3, base64=7))
    assert [label.get_text() for label in axis.get_yticklabels()] == ["image", "base64"]
    assert [bar.get_width() for bar in axis.patches] == [3, 7]
    draw_reasons(axis, Counter())
    assert not axis.axison


def test_head_prints_the_first_rows(data, run):
    lines = [json.loads(line) for line in run("head", "all.list", "-n", 14, "--json").splitlines()]
    assert [line["caption"] for line in lines] == [f"picture {i}" for i in range(14)]
    assert lines[0]["width"] == 20 and lines[0]["meta"] == {"key": "000"} and lines[13]["part"] == "b.gz"
    text = run("head", "all.list", "-n", 99)
    assert "bad (empty_caption)" in text and text.count(" row ") == 31
    with pytest.raises(ConfigError):
        run("head", "all.list", "-n", 0)


def test_the_sheet_shows_the_chosen_rows(data, run):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert "9 of 30 rows" in run("show", "all.list", "--out", f"{name}.png", "-n", 9, "--seed", seed, "--side", 64)
    sheets = [np.asarray(Image.open(data / f"{name}.png")) for name in "abc"]
    assert np.array_equal(sheets[0], sheets[1]) and not np.array_equal(sheets[0], sheets[2])
    # The picture of the first row chosen stands at the foot of the first tile, twice as large.
    row = choose_rows(30, 9, 1)[0]
    picture = np.asarray(Image.open(io.BytesIO(Part("a.gz").read(row).image)).convert("RGB")).repeat(2, 0).repeat(2, 1)
    height, width, _ = picture.shape
    x, y = 8 + (64 - width) // 2, 8 + 64 - height
    assert np.array_equal(sheets[0][y : y + height, x : x + width], picture)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(32, 200))
def test_a_picture_fills_its_tile_as_far_as_whole_factors_reach(width, height, side):
    fitted = fit_image(Image.new("RGB", (width, height)), side)
    assert max(fitted.size) <= side
    if max(width, height) <= side:
        factor = fitted.width // width
        assert fitted.size == (width * factor, height * factor) and max(width, height) * (factor + 1) > side
    else:
        assert max(fitted.size) == side


def test_a_part_that_cannot_be_opened_is_left_out_of_the_sheet(data, run, caplog):
    (data / "tars.filelist").write_text("parts.filelist\nc.tar\n")
    assert "9 of 30 rows" in run("show", "all.list", "--out", "a.png", "-n", 9)
    assert "left out: parts.filelist is not a tar" in caplog.text
    (data / "tars.filelist").write_text("parts.filelist\n")
    (data / "tars.list").write_text("tars.filelist format=webdataset\n")
    with pytest.raises(DataError, match="parts.filelist is not a tar"):
        run("head", "tars.list")
    with pytest.raises(ConfigError, match="--seed -1"):
        run("show", "all.list", "--out", "a.png", "--seed", -1)


def test_a_layout_is_named_by_flag_too(data, run):
    """Rows of laion_aes: metadata in column 3, the picture in column 6."""
    rows = [Part("a.gz").read(number) for number in range(3)]
    meta = [json.dumps({"caption_en": row.caption}) for row in rows]
    lines = [f"x\t\t{text}\t\t\t{b64encode(row.image).decode()}\n" for text, row in zip(meta, rows, strict=True)]
    (data / "aes").write_text("".join(lines))
    (data / "aes.filelist").write_text("aes\n")
    flags = ("aes.filelist", "--layout", "laion_aes")
    assert "picture 2" in run("head", *flags)
    assert "3 of 3 rows are good" in run("verify", *flags)
    for command in ("index", "stats"):
        assert "3 rows in 1 part" in run(command, *flags)
    run("show", *flags, "--out", "sheet.png")
    assert "3 of 3 rows" in run("repack", *flags, "--out", "new")
    assert "picture 2" in run("head", "new/repacked.filelist.list")
    with pytest.raises(ConfigError, match="did you mean laion_aes"):
        run("head", "aes.filelist", "--layout", "laion_ae")
    # Another way to read the same source is another result.
    (data / "aes").write_text("".join(line.replace("x\t\t", f"{line.split(chr(9))[5].strip()}\ty\t") for line in lines))
    run("repack", *flags, "--out", "new")
    image_first = "alt-text2image_gen_filted_data_shuffle_watermark"
    with pytest.raises(ConfigError, match="layout.*make it again with --redo"):
        run("repack", "aes.filelist", "--layout", image_first, "--out", "new")
    run("repack", "aes.filelist", "--layout", image_first, "--out", "new", "--redo")
    assert [Part(data / "new/parts/part-00000.gz").read(number).caption for number in range(3)] == ["y"] * 3


def test_a_result_that_cannot_be_written_is_said_before_the_work(data, run):
    for words in (["show", "all.list"], ["stats", "all.list"], ["verify", "all.list"]):
        with pytest.raises(OutputError):
            run(*words, "--out", data)
        with pytest.raises(OutputError):
            run(*words, "--out", "/proc/none/x")


@pytest.mark.parametrize("workers", [1, 2])
def test_repacked_rows_are_the_rows(data, run, workers):
    manifest = json.loads(run("repack", "all.list", "--out", "new", "--num-workers", workers, "--json"))
    assert (manifest["rows_in"], manifest["rows_out"], manifest["skipped"]) == (30, 29, {"empty_caption": 1})
    sources = read_sources("new/repacked.filelist.list")
    assert [(source.weight, len(source.parts), source.format) for source in sources] == [(1, 2, "part"), (3, 1, "part")]
    parts = [Part(path) for source in sources for path in source.parts]
    found = [part.read(i) for part in parts for i in range(len(part))]
    assert [row.caption for row in found] == [f"picture {i}" for i in range(30) if i != 26]
    assert found[0].image == Part("a.gz").read(0).image and found[0].meta == {"key": "000", "width": 20, "height": 30}
    assert not (data / "cache").exists() and not list((data / "new").rglob("*.tmp"))


def test_repack_goes_on_where_it_stopped(data, run):
    run("repack", "all.list", "--out", "new", "--num-workers", 1)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (data / "new/parts").iterdir()}
    (data / "new/parts/part-00001.gz").write_bytes(b"x")
    (data / "new/.repack/part-00002.gz.json").unlink()
    run("repack", "all.list", "--out", "new", "--num-workers", 1)
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (data / "new/parts").iterdir()}
    assert {path: content for path, (_, content) in before.items()} == {path: c for path, (_, c) in after.items()}
    assert [path.name for path in sorted(after) if before[path][0] == after[path][0] and path.suffix == ".gz"] == [
        "part-00000.gz"
    ]


def test_repack_leaves_others_files_alone(data, run):
    (data / "new/parts").mkdir(parents=True)
    (data / "new/parts/part-00000.gz").write_text("mine")
    with pytest.raises(OutputError):
        run("repack", "all.list", "--out", "new")
    assert (data / "new/parts/part-00000.gz").read_text() == "mine"


def test_a_source_that_changed_is_repacked_anew(data, run):
    (data / "x").write_bytes(b"a\tb\tQUJD\n" + b"a\n" * 3)
    (data / "x.filelist").write_text("x\n")
    run("repack", "x.filelist", "--out", "one")
    (data / "x").write_bytes(b"a\tb\tQUJE\n" + b"a\n" * 4)
    assert json.loads(run("repack", "x.filelist", "--out", "one", "--json"))["skipped"] == {"columns": 4}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_blank_lines_are_counted_by_reason_and_are_no_fault(data, run, pack):
    part = Part("a.gz")
    lines = [encode_row(part.read(row)) for row in range(10)]
    for place in (0, 3, 3, 7, 13):
        lines.insert(place, b"\n")
    (data / "p.gz").write_bytes(pack(b"".join(lines)))
    (data / "p.filelist").write_text("p.gz\n")
    report = json.loads(run("verify", "p.filelist", "--out", "good.filelist", "--json"))
    assert (report["rows"], report["ok"], report["not_rows"]) == (10, 10, {"blank": 5})
    assert (data / "good.filelist").read_text() == f"{data / 'p.gz'}\n"
    assert "not rows, blank lines: 5" in run("verify", "p.filelist")
    assert json.loads(run("stats", "p.filelist", "--json"))["not_rows"] == {"blank": 5}
    assert "not rows, blank lines: 5" in run("stats", "p.filelist")


def test_stats_with_a_tokenizer_count_tokens_and_unknown_words(data, run):
    CaptionTokenizer(build_vocab(["picture 1 2 3"]), 8).save("tok")
    report = json.loads(run("stats", "all.list", "--tokenizer", "tok", "--max-length", "4", "--out", "s.png", "--json"))
    # 27 good rows: "picture" and a number, which the vocabulary spells with 1, 2 and 3 alone.
    known = sum(set(str(i)) <= set("123") for i in range(30) if i not in (13, 17, 26))
    assert report["caption_tokens"][0] == 4 and report["unknown_share"] == pytest.approx((27 - known) / 54)
    assert report["cut_share"] == pytest.approx(sum(i in (11, 12, 21, 22, 23) for i in range(30)) / 27)
    assert "caption, tokens" in run("stats", "all.list", "--tokenizer", "tok")


def test_a_constant_is_drawn_as_its_value():
    axis = Figure().subplots()
    draw_histogram(axis, Counter({48: 7}))
    assert [bar.get_height() for bar in axis.patches] == [7]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["48"]


@pytest.mark.parametrize("num_rows, n", [(30, 9), (30, 30), (5, 9)])
def test_rows_are_chosen_once_each_and_in_random_order(num_rows, n):
    rows = choose_rows(num_rows, n, 1)
    assert len(set(rows)) == len(rows) == min(n, num_rows) and set(rows) <= set(range(num_rows))
    assert rows != sorted(rows) and rows == choose_rows(num_rows, n, 1) != choose_rows(num_rows, n, 2)


def test_stats_of_buckets_say_which_rows_have_which_shape_and_draw_them(data, run):
    # The pictures are 20 to 49 pixels wide and 30 high; those of 33 and 37 cannot be read.
    words = ["stats", "all.list", "--num-workers", "1", "--buckets", "16x32,24x24,32x24"]
    words += ["--settings", "crop_fraction=1.0"]
    report = json.loads(run(*words, "--sheet", "sheet.png", "--chart", "chart.png", "--json"))["buckets"]
    assert report["rows"] + sum(report["skipped"].values()) == 30 and report["skipped"]["size unknown"] == 2
    assert {(one["width"], one["height"]) for one in report["shapes"]} == {(24, 24), (32, 24)} and not report["merged"]
    wide = next(one for one in report["shapes"] if one["width"] == 32)
    kept = [min(width * 24, 30 * 32) / max(width * 24, 30 * 32) for width in range(35, 50) if width != 37]
    assert wide["rows"] == len(kept) and wide["cut"] == pytest.approx(1 - sum(kept) / len(kept), abs=1e-4)
    for name in ("sheet.png", "chart.png"):
        assert Image.open(name).convert("L").getextrema()[0] < 100
    text = run(*words, "bucket_group_size=20")
    assert "merged into others" in text and "not used, size unknown: 2" in text


@pytest.mark.parametrize(
    "words, named",
    [
        (["--sheet", "s.png"], "say nothing without --buckets"),
        (["--buckets", "off"], "--buckets off makes no shapes"),
        (["--buckets", "ratios", "--settings", "bucket_stop=8"], "data.bucket_stop is not known; did you mean"),
        (["--buckets", "512x512"], "no row of"),
    ],
)
def test_stats_of_buckets_that_cannot_be_are_refused(data, run, words, named):
    with pytest.raises(PpldmError, match=named):
        run("stats", "all.list", "--num-workers", "1", *words)
