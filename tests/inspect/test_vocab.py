import io
import json

import pytest
from PIL import Image

from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.inspect.parts import PartName, Span, thin_out
from ppldm.utils.errors import ConfigError, DataError, OutputError

ENGLISH = ["a red heart", "two blue boats", "a red boat"]
CHINESE = ["一颗红色的心", "蓝色的船 boat"]


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 30)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def captions(here):
    """`mixed.filelist`: two parts, English and Chinese."""
    write_part("en.gz", [Row(caption, b"x", {}) for caption in ENGLISH * 20])
    write_part("zh.gz", [Row(caption, b"x", {}) for caption in CHINESE * 20])
    (here / "mixed.filelist").write_text("en.gz\nzh.gz\n")
    return here


def test_its_tokenizer_knows_all_words_and_loads_by_name(captions, run):
    report = json.loads(run("vocab", "mixed.filelist", "--out", "tok", "--size", "300", "--json"))
    assert report["rows"] == 100 and report["unknown_share"] == 0 and report["cut_share"] == 0
    tokenizer = load_tokenizer("tok", 12)
    assert tokenizer.vocab_size == report["size"] <= 300
    assert tokenizer.unknown_words([*ENGLISH, *CHINESE]) == []
    assert len(tokenizer.encode(["一颗红色的心"])[0].nonzero()[0]) == 8


def test_words_are_kept_only_where_they_are_all(captions, run, monkeypatch):
    run("vocab", "mixed.filelist", "--out", "tok")
    tokenizer, whole = load_tokenizer("tok", 12), (captions / "tok/words.txt").read_text()
    assert tokenizer.unknown_words([*ENGLISH, *CHINESE]) == [] and whole.split() == sorted(tokenizer.seen)
    assert tokenizer.unknown_words([f"{ENGLISH[0]} Zebras, 龘!"]) == ["zebras", "龘"]
    run("vocab", "mixed.filelist", "--out", "tok", "--max-rows", "99", "--overwrite")
    assert load_tokenizer("tok", 12).seen is None
    for most in (len(tokenizer.seen), len(tokenizer.seen) - 1):
        monkeypatch.setattr("ppldm.inspect.vocab.MOST_WORDS", most)
        run("vocab", "mixed.filelist", "--out", f"tok{most}")
        assert (captions / f"tok{most}/words.txt").is_file() is (most == len(tokenizer.seen))


def test_any_number_of_processes_gives_the_same_file(captions, run):
    for workers in (1, 2):
        run("vocab", "mixed.filelist", "--out", f"tok{workers}", "--workers", workers)
    assert (captions / "tok1/vocab.txt").read_bytes() == (captions / "tok2/vocab.txt").read_bytes()


def test_the_texts_that_training_draws_are_those_counted(here, run):
    write_part("p.gz", [Row("own", png(), {"blip": "A Red+Boat 船"} if i else {}) for i in range(4)])
    (here / "p.filelist").write_text("p.gz\n")
    flags = ["--captions", "blip:1", "--clean-captions", "--json"]
    report = json.loads(run("vocab", "p.filelist", "--out", "tok", *flags))
    assert (report["words"], report["different_words"]) == (9, 3)
    report = json.loads(run("stats", "p.filelist", "--tokenizer", "tok", "--max-length", "4", *flags))
    assert report["skipped"] == {"no_caption": 1} and report["cut_share"] == 1 and report["unknown_share"] == 0
    assert set(report["caption_words"]) == {3} and set(report["caption_tokens"]) == {5}
    both = json.loads(run("stats", "p.filelist", "--captions", "caption:1,blip:1", "--json"))
    assert both["skipped"] == {} and both["caption_words"][0] == 1 and both["caption_words"][-1] == 3
    with pytest.raises(ConfigError, match="--captions"):
        run("stats", "p.filelist", "--captions", "blip")


def test_coverage_says_what_is_cut(captions, run):
    report = json.loads(run("vocab", "mixed.filelist", "--out", "tok", "--max-length", "5", "--json"))
    assert report["max_length"] == 5 and report["cut_share"] == pytest.approx(0.4)
    assert "captions cut at 5 tokens: 40.00%" in run("vocab", "mixed.filelist", "--out", "t2", "--max-length", "5")


def test_bad_rows_are_passed_over(data, run):
    assert json.loads(run("vocab", "all.list", "--out", "tok", "--json"))["different_words"] > 10


@pytest.mark.parametrize(
    "flags, error, message",
    [
        (["--language", "fr"], ConfigError, "--language fr is not one of en, zh"),
        (["--size", "60"], ConfigError, "--size 60 has no room"),
        (["--max-length", "2"], ConfigError, "--max-length 2"),
        (["--max-rows", "0"], ConfigError, "--max-rows 0"),
    ],
)
def test_what_cannot_be_is_refused_before_a_row_is_read(here, run, flags, error, message):
    with pytest.raises(error, match=message):
        run("vocab", "nowhere.filelist", "--out", "tok", *flags)


def test_a_vocabulary_is_not_overwritten_unasked(captions, run):
    run("vocab", "mixed.filelist", "--out", "tok")
    before = (captions / "tok/vocab.txt").read_text()
    with pytest.raises(OutputError, match="--overwrite"):
        run("vocab", "mixed.filelist", "--out", "tok", "--size", "200")
    assert (captions / "tok/vocab.txt").read_text() == before
    run("vocab", "mixed.filelist", "--out", "tok", "--size", "115", "--overwrite")
    assert (captions / "tok/vocab.txt").read_text() != before


def test_the_same_command_again_says_what_is_there(captions, run):
    command = ["vocab", "mixed.filelist", "--out", "tok", "--json"]
    first = run(*command)
    written = {path.name: path.stat().st_mtime_ns for path in (captions / "tok").iterdir()}
    assert run(*command) == first
    (captions / "tok").rename(captions / "moved")
    again = json.loads(run("vocab", "mixed.filelist", "--out", "moved", "--json", "--num-workers", "1"))
    assert again == json.loads(first) | {"out": "moved"}
    assert {path.name: path.stat().st_mtime_ns for path in (captions / "moved").iterdir()} == written
    before = (captions / "moved/vocab.txt").read_bytes()
    for changes, flags in (
        (lambda: write_part("en.gz", [Row(caption, b"y", {}) for caption in ENGLISH * 20]), []),
        (lambda: None, ["--max-length", "9"]),
        (lambda: (captions / "moved/vocab.txt").write_bytes(before + b"x\n"), []),
        (lambda: (captions / "moved/.vocab.json").unlink(), []),
    ):
        changes()
        with pytest.raises(OutputError, match="moved holds a vocabulary made from other data or settings.*--overwrite"):
            run("vocab", "mixed.filelist", "--out", "moved", *flags)
        run("vocab", "mixed.filelist", "--out", "moved", "--overwrite")
        assert (captions / "moved/vocab.txt").read_bytes() == before


def test_captions_without_words_are_an_error(here, run):
    write_part("blank.gz", [Row("\u200b", b"x", {})])
    (here / "blank.filelist").write_text("blank.gz\n")
    with pytest.raises(DataError, match="no caption"):
        run("vocab", "blank.filelist", "--out", "tok")


@pytest.mark.parametrize("max_rows", [1, 3, 10, 99, 250])
def test_rows_are_thinned_out_evenly(max_rows):
    part = PartName("p", None)
    spans = [Span(part, start, min(start + 100, 250)) for start in range(0, 250, 100)]
    thinned = thin_out(spans, max_rows)
    total = sum(span.stop - span.start for span in thinned)
    assert total <= max_rows and total >= max_rows * 0.7
    assert {span.start for span in thinned} <= {0, 100, 200}
