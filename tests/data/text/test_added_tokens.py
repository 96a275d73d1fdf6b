"""Tokens added behind a vocabulary, in tokenizers of both kinds."""

import json

import needs
import pytest
from small_weights import write_clip

from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.utils.errors import ConfigError


def _tokenizers(tiny, tmp_path):
    return {"wordpiece": tiny.tokenizer, "pairs": write_clip(tmp_path / "clip").parent / "tokenizer"}


@pytest.mark.parametrize("kind", ["wordpiece", "pairs"])
def test_tokenizers_know_added_tokens(tiny, tmp_path, kind):
    """Ids behind the vocabulary, wherever they stand and as they are written; saved, read, and added to again."""
    plain = load_tokenizer(_tokenizers(tiny, tmp_path)[kind], 12)
    one = plain.with_tokens(["<Fido>", "[x]"])
    one.save(tmp_path / "one")
    read = load_tokenizer(tmp_path / "one", 12)
    more = read.with_tokens(["<y>"])
    more.save(tmp_path / "more")
    size = plain.vocab_size
    assert [t.vocab_size for t in (one, read, more)] == [size + 2, size + 2, size + 3]
    for tokenizer in (one, read, more, load_tokenizer(tmp_path / "more", 12)):
        ids = tokenizer.encode(["1<Fido>[x] 1", "<fido> 1"])
        assert [number for number in ids[0] if number >= size] == [size, size + 1] and (ids[1] < size).all()
        assert tokenizer.vocab[size : size + 2] == ["<Fido>", "[x]"]
        assert (tokenizer.encode(["picture 1, red"]) == plain.encode(["picture 1, red"])).all()
    assert tokenizer.encode(["<y>"])[0, 1] == size + 2
    assert len({plain.digest, one.digest, more.digest}) == 3 and one.digest == read.digest
    assert "<Fido> [x]" in " ".join(one.decode(one.encode(["1 <Fido> [x]"])))


@pytest.mark.parametrize("kind", ["wordpiece", "pairs"])
def test_other_programs_have_the_same_ids(tiny, tmp_path, kind):
    needs.need("parity")
    import transformers

    plain = _tokenizers(tiny, tmp_path)[kind]
    config = plain / "tokenizer_config.json" if kind == "pairs" else None
    if config:  # as newer versions of transformers write it
        start = {"content": "<|startoftext|>", "lstrip": False, "normalized": True, "rstrip": False,
                 "single_word": False, "special": True}  # fmt: skip
        config.write_text(json.dumps({"added_tokens_decoder": {"518": start}, "pad_token": "<|endoftext|>"}))
    load_tokenizer(plain, 12).with_tokens(["<fido>", "[x]"]).save(tmp_path / "saved")
    theirs = {"wordpiece": transformers.BertTokenizer, "pairs": transformers.CLIPTokenizer}[kind]
    captions = ["a <fido> 1", "[x] 12 <fido>"]
    found = theirs.from_pretrained(str(tmp_path / "saved"))
    expected = found(captions, padding="max_length", max_length=12, truncation=True).input_ids
    assert load_tokenizer(tmp_path / "saved", 12).encode(captions).tolist() == expected


def test_what_cannot_be_added_is_refused(tiny, tmp_path):
    plain = load_tokenizer(tiny.tokenizer, 12)
    for token in ("two words", "picture"):
        with pytest.raises(ConfigError, match="cannot be added"):
            plain.with_tokens([token])
    plain.with_tokens(["<a>"]).save(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<a>": plain.vocab_size + 1}))
    with pytest.raises(ConfigError, match="do not follow those of its vocabulary"):
        load_tokenizer(tmp_path, 12)
