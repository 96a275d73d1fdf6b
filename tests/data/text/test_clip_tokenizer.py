"""CLIP's tokens are those of PaddleNLP's CLIPTokenizer (and, with the extra `parity`, of transformers')."""

import json
import shutil
import unicodedata

import needs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_weights import write_clip

from ppldm.config.network_files import vocabulary_folder
from ppldm.data.text.tokenizer import ClipTokenizer, load_tokenizer
from ppldm.utils.errors import ConfigError
from ppldm.weights.fill import files_of
from ppldm.weights.model_file import TokenizerFiles
from ppldm.weights.write import copy_tokenizer

CAPTIONS = [
    "",
    "a red blue heart",
    "Red,  BLUE!! 12 1234",
    "it's 红心 ❤️ don't\n",
    "é ñ É",
    "red " * 60,
    "<|endoftext|> a",
]


@pytest.fixture
def folder(tmp_path):
    return write_clip(tmp_path).parent / "tokenizer"


def test_ids_are_those_of_paddlenlp(folder):
    from ppdiffusers.transformers import CLIPTokenizer

    theirs = CLIPTokenizer.from_pretrained(str(folder), pad_token="<|endoftext|>")
    plain = [caption for caption in CAPTIONS if "<" not in caption]
    expected = theirs(plain, padding="max_length", max_length=16, truncation=True).input_ids
    ours = load_tokenizer(folder, 16)
    assert isinstance(ours, ClipTokenizer)
    assert ours.encode(plain).tolist() == [list(ids) for ids in expected]


def test_ids_are_those_of_transformers(folder):
    needs.need("parity")
    import transformers

    theirs = transformers.CLIPTokenizerFast.from_pretrained(str(folder), pad_token="<|endoftext|>")
    expected = theirs(CAPTIONS, padding="max_length", max_length=16, truncation=True).input_ids
    assert load_tokenizer(folder, 16).encode(CAPTIONS).tolist() == expected


def test_saved_and_read_again(folder, tmp_path):
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "!"}}))
    first = load_tokenizer(folder, 9)
    first.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again", 9)
    assert (again.encode(CAPTIONS) == first.encode(CAPTIONS)).all()
    assert again.vocab_size == len(again.vocab) == 520
    assert first.encode([""])[0, -1] == first.vocab.index("!")


def test_words_for_bad_folders(folder, tmp_path):
    def broken(name, text):
        shutil.copytree(folder, tmp_path / "broken", dirs_exist_ok=True)
        (tmp_path / "broken" / name).write_text(text)
        return tmp_path / "broken"

    for name, text, message in (
        ("vocab.json", "{", "is not JSON"),
        ("vocab.json", "[]", "does not hold a JSON object"),
        ("vocab.json", '{"a": 0}', "lacks <|startoftext|>"),
        ("merges.txt", "r zz\n", "do not fit its vocabulary"),
    ):
        with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
            load_tokenizer(broken(name, text), 9)
    (tmp_path / "broken" / "vocab.json").unlink()
    with pytest.raises(ConfigError, match="cannot read .*vocab.json"):
        load_tokenizer(tmp_path / "broken", 9)


def test_what_is_encoded_is_decoded_without_special_tokens(folder):
    tokenizer = load_tokenizer(folder, 40)
    ids = tokenizer.encode(["a red blue heart", "", "é 红心"])
    assert tokenizer.decode(ids) == ["a red blue heart", "", "é 红心"]


ODD = (
    "a “red” heart", "it’s a boat, isn‘t it", "„low“ «quotes» ‚one‘", "ﬁne ﬂag oﬃce ﬆ", "salt &amp; pepper",
    "&lt;b&gt; &quot;it&quot;", "a &amp;amp; b", "caf&eacute;", "x &notanentity; y", "&#8217; &#x2019;",
    "<b>a &amp; b</b>", "cafÃ©", "donâ€™t", "â€œredâ€\x9d", "ＲＥＤ ｂｌｕｅ", "a\u00a0b\u2003c\u3000d",
    "a\u200bb\ufeffc",
    "line\r\nbreak\u2028and\u0085more", "\x1b[31mred\x1b[0m", "bell\x07 del\x7f null\x00", "e\u0301 e\u0308",
    "ΟΔΟΣ Σίσυφος", "İstanbul ǅ ẞ", "½ ① Ⅳ ª", "… — – ‐ −", "❤️ 👩‍👩‍👧 🏳️‍🌈", "红心（蓝）“船”", "\t two\n lines  ",
    "\u212a \u212b \u2126", "ï»¿bom", "lâ€™Ã©tÃ©", "%20 +plus+ &nbsp;x&nbsp;", "", " ", "&", "’", "a\ud83d\ude00b",
)  # fmt: skip
# Assigned since Unicode 3.2: of younger letters the libraries' tables differ in age.
_OLD = st.characters(exclude_categories=("Cs", "Cn", "Co")).filter(
    lambda one: unicodedata.ucd_3_2_0.category(one) != "Cn"
)
_PIECES = ("&amp;", "&eacute;", "Ã©", "â€™", "’", "ﬁ", " ", "<", "Σ", *ODD[:-1])
_TEXTS = st.lists(st.one_of(st.text(_OLD, max_size=8), st.sampled_from(_PIECES)), max_size=6).map("".join)


@pytest.fixture(scope="module")
def pair():
    """(ours, a function of texts: the ids of transformers' own, which has ftfy) of the whole vocabulary."""
    needs.need("parity")
    import transformers

    folder = vocabulary_folder("clip")
    theirs = transformers.CLIPTokenizer.from_pretrained(str(folder))
    assert theirs.fix_text is not None
    return load_tokenizer(
        "clip", 77
    ), lambda texts: theirs(texts, padding="max_length", max_length=77, truncation=True).input_ids


def test_odd_texts_have_the_ids_of_transformers_with_ftfy(pair):
    ours, theirs = pair
    for text in ODD:
        assert ours.encode([text]).tolist() == theirs([text]), text


@settings(deadline=None, max_examples=400)
@given(texts=st.lists(_TEXTS, min_size=1, max_size=4))
def test_any_text_has_the_ids_of_transformers_with_ftfy(pair, texts):
    ours, theirs = pair
    # Of this mark, which looks like a letter where case is ignored, transformers makes no token.
    assume(all("\u0345" not in text for text in ours.read(texts)))
    assert ours.encode(texts).tolist() == theirs(texts)


def test_what_was_trained_before_keeps_its_captions_as_they_are(folder, tmp_path):
    """Nothing said beside a model of ours: as it was. Whatever is saved says it, and is told apart."""
    texts, first = ["a “red” heart", "salt &amp; pepper"], load_tokenizer(folder, 16)
    older = {}
    for name in ("ppldm.json", "manifest.json"):
        shutil.copytree(folder, tmp_path / name / "tokenizer")
        (tmp_path / name / name).write_text("{}")
        older[name] = load_tokenizer(tmp_path / name / "tokenizer", 16)
    told = tmp_path / "told"
    shutil.copytree(folder, told)
    (told / "tokenizer_config.json").write_text('{"ftfy": false}')
    for before in (*older.values(), load_tokenizer(told, 16)):
        assert first.mends and not before.mends and before.digest != first.digest
        assert (before.encode(texts) != first.encode(texts)).any()
        assert (before.encode(['a "red" heart', "salt & pepper"]) == first.encode(texts)).all()
        assert files_of(before).crc32 != files_of(first).crc32
        for one in (before, first, first.with_tokens(["<it>"])):
            saved = tmp_path / "out" / "tokenizer"
            one.save(saved)
            (tmp_path / "out/ppldm.json").write_text("{}")
            again = load_tokenizer(saved, 16)
            assert (again.encode(texts) == one.encode(texts)).all() and again.digest == one.digest
            shutil.rmtree(saved)
            copy_tokenizer(one.folder, saved)
            assert load_tokenizer(saved, 16).mends == one.mends
            shutil.rmtree(tmp_path / "out")
    files = files_of(older["ppldm.json"]).files
    config = {k: v for k, v in json.loads(files["tokenizer_config.json"]).items() if k != "ftfy"}
    as_written_then = {**files, "tokenizer_config.json": json.dumps(config).encode()}
    assert TokenizerFiles(16, as_written_then).crc32 == files_of(older["ppldm.json"]).crc32
    (told / "tokenizer_config.json").write_text('{"ftfy": "yes"}')
    with pytest.raises(ConfigError, match="ftfy 'yes' is neither true nor false; copy the tokenizer again"):
        load_tokenizer(told, 16)
