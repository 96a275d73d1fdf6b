"""CLIP's tokens are those of PaddleNLP's CLIPTokenizer (and, with the extra `parity`, of transformers')."""

import json
import shutil

import needs
import pytest
from small_weights import write_clip

from ppldm.data.text.clip_tokenizer import ClipTokenizer
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.utils.errors import ConfigError

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
