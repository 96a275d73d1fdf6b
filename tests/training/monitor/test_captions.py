import pytest

from ppldm.data.dataset import TextImageDataset
from ppldm.data.filelist import read_sources
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.training.rows import first_caption, measure_captions, report_captions


@pytest.fixture
def make_dataset(tmp_path):
    def make(captions, known, max_length):
        write_part(tmp_path / "part.gz", [Row(caption, b"x", {}) for caption in captions])
        (tmp_path / "f").write_text("part.gz\n")
        tokenizer = CaptionTokenizer(build_vocab(known), max_length)
        return TextImageDataset(read_sources(tmp_path / "f"), {}, 8, 0, tokenizer)

    return make


@pytest.mark.parametrize("num_rows, expected", [(1000, 300), (300, 300), (7, 7), (1, 1)])
def test_rows_are_taken_from_all_over_the_data(make_dataset, num_rows, expected):
    captions = [f"word{number}" for number in range(300)]
    found, bad = measure_captions(make_dataset(captions, ["nothing else"], 8), num_rows)
    assert found.captions == len(found.unknown) == expected and not bad
    assert expected == 1 or "word299" in found.unknown


@pytest.mark.parametrize(
    "known, max_length, level, words",
    [
        (["a red heart"], 8, "INFO", ["0.0% of their words are unknown", "0.0% are cut at 8 tokens"]),
        (["a heart"], 8, "WARNING", ["33.3% of their words are unknown (red)", "`ppldm vocab`"]),
        (["a red heart"], 4, "WARNING", ["100.0% are cut at 4 tokens", "--model_max_length"]),
    ],
)
def test_what_does_not_fit_is_a_warning_with_its_remedy(make_dataset, caplog, known, max_length, level, words):
    report_captions(make_dataset(["a red heart"] * 3, known, max_length))
    (record,) = caplog.records
    assert record.levelname == level and all(word in record.getMessage() for word in words)
    assert ("; " in record.getMessage()) == (level == "WARNING")


@pytest.mark.parametrize(
    "captions, expected", [(["a boat", "b"], "a boat"), (["x" * 300, "b"], "b"), (["x" * 300], None)]
)
def test_an_example_is_the_first_short_caption(make_dataset, captions, expected):
    assert first_caption(make_dataset(captions, ["a"], 8)) == expected


@pytest.mark.parametrize("empty, others, warns", [
    (["", " "], [], True), ([""], ["a red heart"], True), ([""], ["a red heart"] * 9, False),
    ([], ["a red heart"], False),
])  # fmt: skip
def test_captions_that_are_empty_are_counted_and_warned_of(make_dataset, caplog, empty, others, warns):
    report_captions(make_dataset(empty + others, ["a red heart"], 8))
    (record,) = caplog.records
    share = len(empty) / (len(empty) + len(others))
    assert (f"{share:.1%} are empty" in record.getMessage()) is bool(empty)
    assert ("teach no words" in record.getMessage(), record.levelname == "WARNING") == (warns, warns)


@pytest.mark.parametrize("seen, kept", [(["a", "red", "heart", "boat"], True), (["a", "boat"], False), (None, False)])
def test_words_of_other_captions_than_those_trained_on_are_forgotten(make_dataset, seen, kept):
    dataset = make_dataset(["a red heart"] * 3, ["a red heart"], 8)
    dataset.tokenizer.seen = seen and frozenset(seen)
    report_captions(dataset)
    assert (dataset.tokenizer.seen is not None) is kept
