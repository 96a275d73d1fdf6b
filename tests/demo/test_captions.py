"""Law: a caption is what the rule in `ppldm.demo.openmoji.make_caption` says, and always reads as plain words."""

import pytest

from ppldm.demo.openmoji import LANGUAGES, make_caption, read_catalog


@pytest.mark.parametrize(
    ("emoji", "name", "language", "caption"),
    [
        ("🔴", ":red_circle:", "en", "red circle"),
        ("🔴", ":红色圆:", "zh", "红色圆"),
        ("👞", ":man’s_shoe:", "en", "man's shoe"),
        ("👋🏿", ":waving_hand_dark_skin_tone:", "en", "waving hand, dark skin tone"),
        ("👱🏽‍♀️", ":woman_medium_skin_tone_blond_hair:", "en", "woman, medium skin tone, blond hair"),
        (
            "🫱🏿‍🫲🏼",
            ":handshake_dark_skin_tone_medium-light_skin_tone:",
            "en",
            "handshake, dark skin tone, medium-light skin tone",
        ),
        ("🫱🏿‍🫲🏼", ":握手_较深肤色中等浅肤色:", "zh", "握手，较深肤色，中等浅肤色"),
        ("🏾", ":medium-dark_skin_tone:", "en", "medium-dark skin tone"),
        ("🏾", ":中等深肤色:", "zh", "中等深肤色"),
        ("🇳🇴", ":Norway:", "en", "flag of Norway"),
        ("🇳🇴", ":挪威:", "zh", "挪威的旗帜"),
        ("🏴󠁧󠁢󠁥󠁮󠁧󠁿", ":England:", "en", "flag of England"),
        ("🏴‍☠️", ":pirate_flag:", "en", "pirate flag"),
        ("🏁", ":chequered_flag:", "en", "chequered flag"),
    ],
)
def test_rule(emoji, name, language, caption):
    assert make_caption(emoji, name, language) == caption


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_caption_is_its_own_and_reads_as_words(language):
    captions = [drawing.caption for drawing in read_catalog(language).drawings.values()]
    assert len(captions) > 3900
    assert len(set(captions)) == len(captions)
    for caption in captions:
        assert caption == " ".join(caption.split())
        assert not set(caption) & set("_:’\t\n")
        assert not caption.startswith((",", "，")) and not caption.endswith((",", "，"))
