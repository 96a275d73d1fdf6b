from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.text.captions import Coverage, CoverageMeter
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab, load_tokenizer


@pytest.fixture
def meter():
    return CoverageMeter(CaptionTokenizer(build_vocab(["red heart boat"]), 4))


def test_words_and_lengths_are_counted_before_cutting(meter):
    found = meter.measure(["red heart boat red heart", "Red Zebra", "", "☃ ☃"])
    assert (found.captions, found.words) == (4, 9)
    assert found.unknown == Counter({"zebra": 1, "☃": 2})
    assert found.lengths == Counter({7: 1, 4: 2, 2: 1})
    assert found.unknown_share == pytest.approx(3 / 9)
    assert [found.cut_share(length) for length in (7, 6, 4, 3, 1)] == [0, 0.25, 0.25, 0.75, 1]
    assert [found.length_at(share) for share in (0.25, 0.5, 0.75, 1)] == [2, 4, 4, 7]


def test_parts_add_up_to_the_whole(meter):
    captions = ["red heart", "zebra", "boat boat boat boat boat"]
    total = sum((meter.measure([caption]) for caption in captions), Coverage())
    assert total == meter.measure(captions)


def test_without_captions_nothing_is_unknown_or_cut():
    assert (Coverage().unknown_share, Coverage().cut_share(3), Coverage().length_at(0.5)) == (0, 0, 0)


def test_it_says_what_is_unknown_and_how_much_is_cut(meter):
    text = meter.measure(["red zebra", "red heart boat red heart"]).describe(4)
    assert "14.3% of their words are unknown (zebra), 50.0% are cut at 4 tokens" in text and "the longest 7" in text


WORDS = ["red", "heart", "boat", "zebra", "a", "Ünder", "☃", "don't", "1,000"]


@cache
def make_tokenizer(kind, max_length):
    if kind == "clip":
        return load_tokenizer("clip", max_length)
    return CaptionTokenizer(build_vocab(["red heart boat"]), max_length)


@cache
def make_meter(kind, max_length):
    return CoverageMeter(make_tokenizer(kind, max_length))


@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("kind", ["wordpiece", "clip"])
@given(words=st.lists(st.sampled_from(WORDS), max_size=14), max_length=st.sampled_from([3, 4, 7, 12]))
def test_what_is_lost_is_what_changes_nothing(kind, words, max_length):
    tokenizer, meter = make_tokenizer(kind, max_length), make_meter(kind, max_length)
    (text,) = tokenizer.read([" ".join(words)])  # CLIP's own mends it, and shows it so
    (ids,) = tokenizer.encode([text])
    found = meter.measure([text])
    assert bool(found.lost) == (found.cut_share(max_length) == 1) and text.endswith(found.lost)
    if found.lost:
        kept = text[: len(text) - len(found.lost)]
        is_cut_between_words = meter.measure([kept]).length_at(1) == max_length
        if is_cut_between_words and kept[-1:] in ("", " "):
            assert (ids[:-1] == tokenizer.encode([kept + " red" * max_length])[0][:-1]).all()
        assert (ids == tokenizer.encode([text + " red boat"])[0]).all()
        assert f"one loses {found.lost[:60]!r}" in found.describe(max_length)
    else:
        assert "loses" not in found.describe(max_length)


def test_of_a_long_rest_the_beginning_is_shown(meter):
    text = meter.measure(["red heart " + "boat " * 100]).describe(4)
    assert "; one loses 'boat boat " in text and "…)" in text and len(text) < 250
