"""Laws of the quickstart subset: nothing held out is drawn, and every word of a held-out prompt is known from others."""

from itertools import combinations

import pytest

from ppldm.data.tokenizer import build_vocab
from ppldm.demo.captions import LANGUAGES
from ppldm.demo.openmoji import read_catalog
from ppldm.demo.subsets import QUICKSTART


def test_prompts_are_drawn_and_held_out_emoji_are_not():
    assert len(set(QUICKSTART.drawn)) == len(QUICKSTART.drawn)
    assert set(QUICKSTART.prompts) <= set(QUICKSTART.drawn)
    assert not set(QUICKSTART.held_out) & set(QUICKSTART.drawn)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_held_out_prompt_is_a_new_combination_of_known_words(language):
    catalog = read_catalog(language)
    captions = [drawing.caption for drawing in catalog.choose(QUICKSTART)]
    unseen = [text for text, kind in catalog.prompts(QUICKSTART) if kind == "unseen"]
    assert unseen and not set(unseen) & set(captions)
    assert set(build_vocab(unseen)) <= set(build_vocab(captions))


def test_no_two_captions_are_alike():
    captions = [drawing.caption for drawing in read_catalog("en").choose(QUICKSTART)]
    assert all(a != b for a, b in combinations(captions, 2))
