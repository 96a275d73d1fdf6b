"""T5's captions to token ids, by tokenizers in Rust: of a folder with `spiece.model`, a model of sentencepiece (Kudo
and Richardson 2018, arXiv:1808.06226), or, where there is none, with `tokenizer.json`.

The ids are those of sentencepiece: text is normalised (NFKC), its case kept, and each word, with ▁ before it, is cut
into the most probable pieces (unigrams, Kudo 2018, arXiv:1804.10959). No piece reaches across a space. A caption has
nothing before it, `</s>` behind it, and is padded with `<pad>` to any length: a T5 has no table of positions.

spiece.model is a message of protocol buffers, of which the wire format (protobuf.dev/programming-guides/encoding) is
read here: sentencepiece 0.2.3 brings classes for it that want a later protobuf than the other packages do.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import Unigram
from tokenizers.processors import TemplateProcessing

from ...config.network_files import TOKENIZER_CONFIG, pieces_file
from ...utils.checksums import hash_file
from ...utils.errors import ConfigError
from ...utils.files import make_output_dir, read_small, write_json
from .tokenizer import WordTokenizer

_PAD, _END, _UNKNOWN, _SPACE = "<pad>", "</s>", "<unk>", "▁"
# Of sentencepiece_model.proto: pieces, training and normalizer of a model, by number, and what is read of each.
_MESSAGES = {
    1: {1: "text", 2: "score", 3: "kind"},
    2: {3: "model_type", 35: "byte_fallback", 40: "unknown"},
    3: {2: "table", 3: "prefix", 4: "collapse", 5: "escape"},
}
_NORMAL, _UNKNOWN_KIND, _CONTROL = 1, 2, 3  # kinds of pieces
_SIZES = {1: 8, 5: 4}  # bytes of numbers, by their wire type


class T5Tokenizer(WordTokenizer):
    """Of a folder."""

    def __init__(self, folder, max_length: int):
        self.folder, self._file = Path(folder), pieces_file(Path(folder))
        content = read_small(self._file, ConfigError, inside=True)
        try:
            is_model = self._file.suffix == ".model"
            tokenizer = _build(content) if is_model else Tokenizer.from_str(content.decode())
            tokenizer.no_truncation()
            tokenizer.no_padding()
            ids = tokenizer.get_vocab()
            if tokenizer.encode("").ids != [ids[_END]] or not {_PAD, _UNKNOWN} <= ids.keys():
                raise ValueError(f"its captions are not ended by {_END} and padded with {_PAD}")
        except Exception as error:  # the library has no narrower class
            raise ConfigError(f"{self._file} is not the tokenizer of a T5 ({error!r:.200}); copy it again") from error
        self.digest = hash_file(self._file)[:32]
        super().__init__(tokenizer, sorted(ids, key=ids.__getitem__), (), max_length, _PAD, _END, _UNKNOWN)

    def decode(self, ids: np.ndarray) -> list[str]:
        """The texts of token ids [N, L] without special tokens."""
        return self.whole.decode_batch(ids.tolist(), skip_special_tokens=True)

    def save(self, folder) -> None:
        """Write what `load_tokenizer` and T5Tokenizer.from_pretrained read."""
        folder = make_output_dir(folder)
        for name in (self._file.name, "special_tokens_map.json", TOKENIZER_CONFIG):
            if (self.folder / name).is_file():
                (folder / name).write_bytes(read_small(self.folder / name, ConfigError, inside=True))
        if not (folder / TOKENIZER_CONFIG).is_file():
            names = {"pad_token": _PAD, "eos_token": _END, "unk_token": _UNKNOWN, "extra_ids": 0}
            length = {"model_max_length": self.max_length}
            write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "T5Tokenizer", **length, **names})


def _build(content: bytes) -> Tokenizer:
    """The tokenizer of a spiece.model. Raises ValueError, LookupError, struct.error, Exception."""
    found: dict[int, list[dict]] = {number: [] for number in _MESSAGES}
    for number, value in _fields(content):
        if names := _MESSAGES.get(number):
            found[number].append({names[one]: inner for one, inner in _fields(value) if one in names})
    pieces, (training,), (normalizer,) = found.values()
    as_t5 = all(normalizer.get(one, True) for one in ("prefix", "collapse", "escape"))
    as_t5 &= training.get("model_type", 1) == 1 and not training.get("byte_fallback")
    if not as_t5 or not {piece.get("kind", _NORMAL) for piece in pieces} <= {_NORMAL, _UNKNOWN_KIND, _CONTROL}:
        raise ValueError("it is no model of unigrams with T5's settings")
    scores = [(piece["text"].decode(), struct.unpack("<f", piece.get("score", bytes(4)))[0]) for piece in pieces]
    tokenizer = Tokenizer(Unigram(scores, training.get("unknown", 0), False))
    rules = [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), _SPACE)]
    if table := normalizer.get("table"):
        rules.insert(0, normalizers.Precompiled(table))
    tokenizer.normalizer = normalizers.Sequence(rules)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "always")
    tokenizer.decoder = decoders.Metaspace(_SPACE, "always")
    tokenizer.add_special_tokens(
        [text for (text, _), piece in zip(scores, pieces, strict=True) if piece.get("kind") == _CONTROL]
    )
    ends = [(_END, tokenizer.token_to_id(_END))]
    tokenizer.post_processor = TemplateProcessing(single=["$A", _END], special_tokens=ends)
    return tokenizer


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, in order: number, and a whole number or bytes. Raises ValueError, IndexError."""
    place = 0

    def read() -> int:
        nonlocal place
        value = 0
        for shift in range(0, 64, 7):
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a number of more than 64 bits")

    while place < len(message):
        number, kind = divmod(read(), 8)
        if kind == 0:
            yield number, read()
            continue
        end = (_SIZES[kind] if kind in _SIZES else read()) + place
        if kind not in (*_SIZES, 2) or end > len(message):
            raise ValueError("a field is cut short")
        yield number, message[place:end]
        place = end
