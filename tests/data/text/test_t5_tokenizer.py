"""T5's tokenizer gives the ids of sentencepiece, in both of its forms, and ends, cuts and pads captions as transformers
does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from small_t5 import train_pieces
from tokenizers import Tokenizer

from ppldm.config.network_files import pieces_file
from ppldm.data.text.captions import CoverageMeter
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.utils.errors import ConfigError, PpldmError
from ppldm.weights.folders import is_tokenizer

LENGTH = 16
PAD, END, UNKNOWN = 0, 1, 2
ODD = ["", " ", "a red cat", " a  red ", "一只 红色的猫", "一只红色的猫坐在绿色的垫子上", "ünknown ¨x ㎏\n b　c",
       "a\u00a0b", "¨",
       "a ▁b", "▁", "a\u0301 \u0301b", "Cat, CAT.", "red " * 40, "猫" * 40]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    train_pieces(folder / "spiece.model")
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    return SentencePieceProcessor(model_file=str(folder / "spiece.model"))


def expected(theirs, captions):
    """Right padding, the end always there."""
    rows = np.full((len(captions), LENGTH), PAD)
    for row, ids in zip(rows, theirs.encode(captions), strict=True):
        ids = [*ids[: LENGTH - 1], END]
        row[: len(ids)] = ids
    return rows


@pytest.mark.parametrize("form", ["spiece.model", "tokenizer.json"])
def test_ids_are_those_of_sentencepiece(folder, theirs, tmp_path, form):
    ours = load_tokenizer(folder, LENGTH)
    if form == "tokenizer.json":
        ours.whole.enable_padding(length=5)  # as some of these files have it
        ours.whole.save(str(tmp_path / form))
        ours = load_tokenizer(tmp_path, LENGTH)
    np.testing.assert_array_equal(ours.encode(ODD), expected(theirs, ODD))
    facts = (ours.start, ours.end_id, ours.unknown_id, ours.room, ours.vocab_size)
    assert facts == (0, END, UNKNOWN, LENGTH - 1, theirs.get_piece_size())
    assert ours.vocab == [theirs.id_to_piece(number) for number in range(ours.vocab_size)]


_LETTERS = st.sampled_from([*"abcdet  \u00a0\t,.'ü一只猫¨㎏A1▁", "  ", " cat", " green", " 红色的猫"])


@given(st.lists(_LETTERS, max_size=40).map("".join))
def test_no_piece_reaches_across_a_space(folder, theirs, caption):
    np.testing.assert_array_equal(load_tokenizer(folder, LENGTH).encode([caption]), expected(theirs, [caption]))


def test_without_a_normalizer(tmp_path):
    path = train_pieces(tmp_path / "spiece.model", normalization_rule_name="identity")
    theirs = SentencePieceProcessor(model_file=str(path))
    plain = [caption for caption in ODD if caption.isascii() and "\n" not in caption]
    np.testing.assert_array_equal(load_tokenizer(tmp_path, LENGTH).encode(plain), expected(theirs, plain))


def test_what_is_saved_is_the_same_tokenizer(folder, tmp_path):
    ours = load_tokenizer(folder, LENGTH)
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved", LENGTH)
    assert again.digest == ours.digest and (again.encode(ODD) == ours.encode(ODD)).all()
    assert (tmp_path / "saved/spiece.model").read_bytes() == (folder / "spiece.model").read_bytes()
    train_pieces(tmp_path / "spiece.model", normalization_rule_name="nfkc")
    assert load_tokenizer(tmp_path, LENGTH).digest != ours.digest


def test_texts_and_what_of_captions_is_lost(folder):
    ours = load_tokenizer(folder, 8)
    assert ours.decode(ours.encode(["a red cat", ""])) == ["a red cat", ""]
    assert ours.unknown_words(["a red 漢 cat", "Q 漢"]) == ["漢", "Q"]
    count, rest = ours.measure("a red cat on the green mat picture", ours.room)
    assert count > ours.room and rest and "a red cat on the green mat picture".endswith(rest)
    found = CoverageMeter(ours).measure(["a red 漢 cat", "red " * 20])
    assert found.unknown == {"漢": 1} and found.captions == 2 and found.lost.startswith("red")


@pytest.mark.parametrize(
    "files, found",
    [
        ({"spiece.model"}, "spiece.model"),
        ({"spiece.model", "tokenizer.json"}, "spiece.model"),
        ({"tokenizer.json"}, "tokenizer.json"),
        ({"tokenizer.json", "vocab.txt"}, None),
        ({"tokenizer.json", "merges.txt", "vocab.json"}, None),
        (set(), None),
    ],
)
def test_which_file_is_read(tmp_path, files, found):
    for name in files:
        (tmp_path / name).touch()
    assert pieces_file(tmp_path) == (found and tmp_path / found)
    assert is_tokenizer(tmp_path) == bool(files)


@pytest.mark.parametrize("model_type", ["bpe", "word", "char"])
def test_models_of_other_kinds_are_refused(tmp_path, model_type):
    train_pieces(tmp_path / "spiece.model", model_type=model_type)
    with pytest.raises(ConfigError, match=r"spiece.model is not the tokenizer of a T5 .*unigrams.*; copy it again$"):
        load_tokenizer(tmp_path, LENGTH)


@pytest.mark.parametrize(
    "settings",
    [{"byte_fallback": True, "vocab_size": 400}, {"user_defined_symbols": ["red"]}, {"add_dummy_prefix": False},
     {"remove_extra_whitespaces": False}, {"eos_piece": "<end>"}],
)  # fmt: skip
def test_settings_that_give_other_ids_are_refused(tmp_path, settings):
    train_pieces(tmp_path / "spiece.model", **settings)
    with pytest.raises(ConfigError, match="is not the tokenizer of a T5"):
        load_tokenizer(tmp_path, LENGTH)


@given(st.data())
def test_a_damaged_file_is_refused_or_is_a_tokenizer(folder, tmp_path_factory, data):
    content = bytearray((folder / "spiece.model").read_bytes())
    end = data.draw(st.integers(0, len(content) - 1))
    damaged = tmp_path_factory.mktemp("damaged")
    (damaged / "spiece.model").write_bytes(content[:end])
    with pytest.raises(PpldmError):
        load_tokenizer(damaged, LENGTH)


def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path):
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="tokenizer.json is not the tokenizer of a T5"):
        load_tokenizer(tmp_path, LENGTH)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json is not the tokenizer of a T5"):
        load_tokenizer(tmp_path, LENGTH)
