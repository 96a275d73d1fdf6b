"""Laws of wildcards: what is drawn is one of the texts that the caption means, each choice alike often; text without
marks stays as it is."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppldm.data.text.captions import expand_wildcards
from ppldm.utils.rng import Stream, make_rng

PLAIN = st.text(st.characters(exclude_characters="{|}\\"), max_size=5)


def escaped(text):
    return "".join(f"\\{char}" if char in "{|}\\" else char for char in text)


# (a caption, all texts that it means)
CAPTIONS = st.recursive(
    st.text("ab{|}\\", max_size=3).map(lambda text: (escaped(text), [text])),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(
            lambda two: (two[0][0] + two[1][0], [a + b for a, b in itertools.product(two[0][1], two[1][1])])
        ),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda many: (f"{{{'|'.join(one for one, _ in many)}}}", sum((texts for _, texts in many), []))
        ),
    ),
    max_leaves=5,
)


@given(CAPTIONS, st.integers(0, 1 << 30))
def test_one_of_the_texts_that_it_means(caption, row):
    written, texts = caption
    draws = [expand_wildcards(written, make_rng(1, Stream.CAPTION_WILDCARD, 0, row).random) for _ in range(2)]
    assert draws[0] == draws[1] and draws[0] in texts


@given(PLAIN)
def test_text_without_marks_stays_and_draws_nothing(text):
    assert expand_wildcards(text, None) == text


@pytest.mark.parametrize("text", ["{a", "a}", "a|b", "}{", "{a {b", "\\x"])
def test_marks_without_a_counterpart_are_text(text):
    assert expand_wildcards(text, None) == text


def test_each_choice_comes_alike_often():
    rng = make_rng(1, Stream.CAPTION_WILDCARD)
    found = [expand_wildcards("a {red|{dark |}blue|} heart", rng.random) for _ in range(3000)]
    assert all(900 < found.count(f"a {word} heart") < 1100 for word in ("red", ""))
    assert all(430 < found.count(f"a {word} heart") < 570 for word in ("dark blue", "blue"))


def test_deep_and_long_captions_are_read_in_a_moment():
    assert expand_wildcards("{" * 50_000 + "x" + "}" * 50_000, lambda: 0.0) == "x"
