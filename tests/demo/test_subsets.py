"""Laws of the quickstart subset: nothing held out is drawn; the words of a held-out prompt are in other captions."""

import pytest

from ppldm.data.text.tokenizer import build_vocab
from ppldm.demo.openmoji import LANGUAGES, QUICKSTART, read_catalog


def test_prompts_are_drawn_and_held_out_emoji_are_not():
    assert len(set(QUICKSTART.drawn)) == len(QUICKSTART.drawn)
    assert set(QUICKSTART.prompts) <= set(QUICKSTART.drawn)
    assert not set(QUICKSTART.held_out) & set(QUICKSTART.drawn)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_held_out_prompt_is_a_new_combination_of_known_words(language):
    catalog = read_catalog(language)
    captions = [drawing.caption for drawing in catalog.find(QUICKSTART.drawn)]
    unseen = [drawing.caption for drawing in catalog.find(QUICKSTART.held_out)]
    assert unseen and not set(unseen) & set(captions)
    assert set(build_vocab(unseen)) <= set(build_vocab(captions))
