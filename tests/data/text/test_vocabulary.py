import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.text import vocabulary
from ppldm.data.text.tokenizer import SPECIAL_TOKENS, CaptionTokenizer, count_words
from ppldm.data.text.vocabulary import LANGUAGES, learn_vocabulary
from ppldm.utils.errors import ConfigError

CAPTIONS = [
    "a red heart, and a blue heart",
    "Two boats; the boats of the harbour",
    "一颗红色的心 red heart",
    "红色的船，蓝色的心",
    "café №5 ☃ ☃",
]


def unknown_words(vocab, captions):
    return CaptionTokenizer(vocab, 200).unknown_words(captions)


@pytest.mark.parametrize("size", [110, 150, 300, 30_000])
@pytest.mark.parametrize("captions", [CAPTIONS, CAPTIONS[:2], CAPTIONS[3:]])
def test_it_has_at_most_so_many_tokens_and_each_once(captions, size):
    vocab = learn_vocabulary(count_words(captions), size, ["en"])
    assert len(vocab) == len(set(vocab)) <= size
    assert tuple(vocab[:5]) == SPECIAL_TOKENS
    CaptionTokenizer(vocab, 8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(alphabet="ażółć龘круг ", min_size=1, max_size=20), min_size=1), st.integers(109, 130))
def test_it_has_at_most_so_many_tokens_where_characters_do_not_fit(captions, size):
    assert len(learn_vocabulary(count_words(captions), size, ["en"])) <= size


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(alphabet="abcdé 中文☃-", min_size=1), min_size=1, max_size=8))
def test_with_room_for_the_characters_no_word_is_unknown(captions):
    vocab = learn_vocabulary(count_words(captions), 1000, ["en"])
    assert unknown_words(vocab, captions) == []


def test_frequent_words_are_tokens_and_rare_ones_are_spelled():
    counts = Counter({"heart": 50, "boat": 40, "zyzzyva": 1})
    vocab = learn_vocabulary(counts, 119, ["en"])
    assert {"heart", "boat"} <= set(vocab) and "zyzzyva" not in vocab
    assert unknown_words(vocab, ["zyzzyva"]) == []


def test_a_letter_seen_inside_words_only_may_begin_a_word():
    vocab = learn_vocabulary(count_words(["привет"]), 1000, ["en"])
    assert unknown_words(vocab, ["тир"]) == []


def test_where_there_is_no_room_the_rarest_characters_go():
    common, rare = "中" * 9 + "文" * 9, "龘靐"
    vocab = learn_vocabulary(count_words([common, rare]), len(set(LANGUAGES["en"])) + 5 + 2, ["en"])
    assert "中" in vocab and "文" in vocab and not set(rare) & set(vocab)
    assert unknown_words(vocab, [common, rare]) == list(rare)


@pytest.mark.parametrize(
    "languages, text", [(["en"], "Quick, 42!"), (["zh"], "猫坐在垫子上。"), (["en", "zh"], "a 猫")]
)
def test_prompts_in_a_language_are_known_though_no_caption_has_their_characters(languages, text):
    vocab = learn_vocabulary(count_words(["б"]), 5000, languages)
    assert unknown_words(vocab, [text]) == []


def test_a_size_without_room_for_the_language_is_refused():
    with pytest.raises(ConfigError, match="give at least 109"):
        learn_vocabulary(Counter(), 100, ["en"])
    assert len(learn_vocabulary(Counter(), 109, ["en"])) == 109


def test_counts_in_any_order_in_any_process_give_the_same_tokens():
    words = [f"{a}{b}{c}" for a in "abc" for b in "defg" for c in ("ing", "ed", "s")]
    counts = {word: 1 + number % 5 for number, word in enumerate(words)}
    expected = learn_vocabulary(Counter(counts), 150, ["en"])
    assert learn_vocabulary(Counter(dict(reversed(counts.items()))), 150, ["en"]) == expected
    # The trainer's hash tables are seeded anew in each process.
    code = (
        "from collections import Counter; from ppldm.data.text.vocabulary import learn_vocabulary; "
        f"print(*learn_vocabulary(Counter({counts}), 150, ['en']))"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == expected


def test_huge_counts_are_scaled_down(monkeypatch):
    monkeypatch.setattr(vocabulary, "_MAX_WORDS", 50_000)
    counts = Counter({"heart": 10**12, "boat": 10**12, "rare": 1})
    read = Counter(word for text in vocabulary._texts(counts) for word in text.split())
    assert read == {"heart": 25_000, "boat": 25_000, "rare": 1}
    assert {"heart", "boat"} <= set(learn_vocabulary(counts, 120, ["en"]))
