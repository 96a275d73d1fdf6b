"""Laws of captions: a draw of (seed, epoch, row) and of nothing else; in the proportions of the weights; whatever is
off changes no draw."""

from collections import Counter
from functools import partial

import pytest

from ppldm.config.data import CaptionOptions, caption_identity
from ppldm.data.formats.row import Row
from ppldm.data.text.captions import CaptionRule, TagRule
from ppldm.families.ldm import LdmConfig
from ppldm.training.commands.train import read_recipe
from ppldm.utils.errors import ConfigError, RowError
from ppldm.utils.rng import Stream, make_rng

NUM_ROWS = 3000
ROW = Row("own", b"", {"blip": "short", "llava": "a long one", "five": ["one", "two", "", 3], "blank": " ", "n": 7})
SEVERAL = Row("a", b"", {}, ("b", "c", "d"))


def rule(**settings) -> CaptionRule:
    return CaptionRule.of(CaptionOptions(**{"caption_drop": 0.0, **settings}))


def draws(found: CaptionRule, row: Row = ROW, epoch: int = 0) -> list[str]:
    return [found.draw(row, partial(make_rng, 23, epoch=epoch, row=number)) for number in range(NUM_ROWS)]


def shares(found: CaptionRule, row: Row = ROW) -> dict[str, float]:
    return {text: count / NUM_ROWS for text, count in Counter(draws(found, row)).items()}


def test_texts_come_in_the_proportions_of_their_weights():
    found = shares(rule(captions={"caption": 1, "blip": 3, "llava": 6}))
    assert found == pytest.approx({"own": 0.1, "short": 0.3, "a long one": 0.6}, abs=0.03)


def test_a_row_without_one_of_them_draws_from_the_others():
    found = shares(rule(captions={"caption": 1, "blip": 3, "lacking": 5, "blank": 5, "n": 5}))
    assert found == pytest.approx({"own": 0.25, "short": 0.75}, abs=0.03)


def test_a_field_may_hold_several_texts():
    found = shares(rule(captions={"caption": 1, "five": 1}))
    assert found == pytest.approx({"own": 0.5, "one": 0.25, "two": 0.25}, abs=0.03)
    first = shares(rule(captions={"caption": 1, "five": 1}, caption_choice="first"))
    assert first == pytest.approx({"own": 0.5, "one": 0.5}, abs=0.03)


def test_a_row_with_none_of_them_is_a_bad_row():
    found = rule(captions={"lacking": 1, "blank": 1})
    with pytest.raises(RowError, match="none of lacking, blank holds text") as caught:
        found.check(ROW)
    assert caught.value.reason == "no_caption"
    rule().check(Row("", b"", {}))  # an empty caption is one, unless others are asked for


def test_of_several_captions_each_or_the_first():
    assert shares(rule(), SEVERAL) == pytest.approx(dict.fromkeys("abcd", 0.25), abs=0.03)
    assert set(draws(rule(caption_choice="first"), SEVERAL)) == {"a"}
    assert draws(rule(captions={"caption": 2}), SEVERAL) == draws(rule(), SEVERAL)


def test_the_published_draws_stay_what_they_were():
    """A tenth of captions dropped, one of several by the first number of its stream."""

    def expected(number):
        if make_rng(23, Stream.CAPTION_DROP, 2, number).random() < 0.1:
            return ""
        return "abcd"[int(make_rng(23, Stream.CAPTION_CHOICE, 2, number).random() * 4)]

    assert draws(CaptionRule.of(CaptionOptions()), SEVERAL, epoch=2) == [expected(number) for number in range(NUM_ROWS)]


def test_draws_differ_by_epoch_and_not_by_what_else_is_drawn():
    plain, dropped = rule(captions={"blip": 1, "llava": 1}), rule(captions={"blip": 1, "llava": 1}, caption_drop=0.3)
    assert draws(plain) == draws(plain) != draws(plain, epoch=1)
    pairs = list(zip(draws(plain), draws(dropped), strict=True))
    assert all(two in ("", one) for one, two in pairs) and 0.27 < sum(not two for _, two in pairs) / NUM_ROWS < 0.33
    row = Row("{a|b}, {c|d}, e", b"", {})
    plain, shuffled = rule(caption_wildcards=True), rule(caption_wildcards=True, shuffle_tags=True)
    for one, two in zip(draws(plain, row), draws(shuffled, row), strict=True):
        assert sorted(one.split(", ")) == sorted(two.split(", "))


def test_wildcards_then_tags_then_cleaning():
    row = Row("{Red, big|Small} #123, Z 船", b"", {})
    found = set(draws(rule(caption_wildcards=True, shuffle_tags=True, keep_tags=1, clean_captions=True), row))
    assert found == {"red, big, z", "red, z, big", "small, z"}
    assert set(draws(rule(), row)) == {row.caption}


def test_for_measuring_nothing_is_dropped_or_moved():
    fixed = rule(caption_drop=1.0, shuffle_tags=True, tag_drop_probability=0.5, keep_tags_separator="|").fixed()
    assert set(draws(fixed, Row("a,b|c", b"", {}))) == {"a, b, c"}
    assert rule(captions={"blip": 1, "five": 1}).texts(ROW) == ["short", "one", "two"]
    assert rule(captions={"five": 1}, caption_choice="first", clean_captions=True).texts(ROW) == ["one"]


def test_a_run_of_other_captions_is_another_run():
    usual = caption_identity(CaptionOptions())
    assert usual["captions"] is None and usual["caption_drop"] == 0.1
    for change in ({"captions": {"blip": 1.0}}, {"keep_tags": 1}, {"clean_captions": True}):
        assert caption_identity(CaptionOptions(**change)) != usual
    assert caption_identity(CaptionOptions(captions={"a": 0.5, "b": 2.0}))["captions"] == "a:0.5,b:2"


@pytest.mark.parametrize(
    "wrong",
    [{"tag_separator": ""}, {"keep_tags_separator": ","}, {"keep_tags_separator": ";", "tag_group_separator": ";"}],
)
def test_separators_that_do_not_differ_are_refused(wrong):
    with pytest.raises(ConfigError, match="--tag_separator .* must differ"):
        CaptionOptions(**wrong).check()


def test_settings_of_sd_scripts_are_taken():
    words = ["--shuffle_caption", "--keep_tokens", "2", "--caption_tag_dropout_rate", "0.25", "--enable_wildcard",
             "--caption_separator", ";", "--keep_tokens_separator", "|||", "--secondary_separator", "&&"]  # fmt: skip
    made = CaptionRule.of(read_recipe(words, True, LdmConfig).data)
    assert made == CaptionRule(0.1, tags=TagRule(True, 0.25, 2, ";", "|||", "&&"), wildcards=True)
    assert CaptionRule.of(read_recipe([], True, LdmConfig).data) == CaptionRule(0.1)
