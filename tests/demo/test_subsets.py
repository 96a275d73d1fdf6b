"""Laws of the small subsets: nothing held out is drawn; the words of a held-out prompt are in other captions; captions
of hearts have their token."""

import re

import pytest

from ppldm.data.text.tokenizer import build_vocab
from ppldm.demo.openmoji import HEARTS, LANGUAGES, QUICKSTART, SUBSETS, demo_data, read_catalog
from ppldm.training.commands.finetune import _TOKEN


@pytest.mark.parametrize("subset", SUBSETS.values(), ids=SUBSETS)
def test_prompts_are_drawn_and_held_out_emoji_are_not(subset):
    assert len(set(subset.drawn)) == len(subset.drawn)
    assert set(subset.prompts) <= set(subset.drawn)
    assert not set(subset.held_out) & set(subset.drawn)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_caption_of_hearts_has_the_token_that_finetune_trains(tmp_path, language):
    demo_data(str(tmp_path / "out"), size=8, subset="hearts", language=language)
    captions = [path.read_text().strip() for path in (tmp_path / "out/images").glob("*.txt")]
    prompts = [line.split("\t") for line in (tmp_path / "out/prompts.txt").read_text().splitlines()]
    assert len(captions) == len(set(captions)) == len(HEARTS.drawn) == 21
    for text in (*captions, *(text for text, _ in prompts)):
        assert _TOKEN.findall(text) == [HEARTS.token] and not re.search(r"(?<!<)heart|心", text)
    assert [kind for _, kind in prompts] == ["seen"] * 4 + ["unseen"] * 2
    assert all((text in captions) == (kind == "seen") for text, kind in prompts)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_held_out_prompt_is_a_new_combination_of_known_words(language):
    catalog = read_catalog(language)
    captions = [drawing.caption for drawing in catalog.find(QUICKSTART.drawn)]
    unseen = [drawing.caption for drawing in catalog.find(QUICKSTART.held_out)]
    assert unseen and not set(unseen) & set(captions)
    assert set(build_vocab(unseen)) <= set(build_vocab(captions))
