"""CLIP's tokenizer in Rust: byte-level pairs with the ids that transformers' CLIPTokenizerFast gives.

A tokenizer is a folder with `vocab.json` (token to id) and `merges.txt` (pairs, the most frequent first). Text is
mended by ftfy (quotes, ligatures, HTML entities, text decoded wrongly), as CLIP was trained and as transformers'
CLIPTokenizer does where ftfy is installed; not where tokenizer_config.json says `"ftfy": false`, or says nothing beside
a model that ppldm trained, which then saw its captions as they are. It is normalised (NFC), lower-cased, cut into
words, numbers, and runs of other characters, and each is merged by pairs (Radford et al. 2021, arXiv:2103.00020,
section 2.4).
"""

from collections.abc import Sequence
from pathlib import Path

import ftfy
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.processors import RobertaProcessing

from ...config.clip_vocabulary import END, MENDS, START, mends_text, write_mends
from ...config.clip_vocabulary import TOKENIZER_CONFIG as _CONFIG
from ...utils.checksums import digest_of
from ...utils.errors import ConfigError
from ...utils.files import is_table, make_output_dir, read_json_object, read_small, write_json
from .words import WordTokenizer, add_tokens, read_added, write_added

_WORDS = Regex(r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+""")
_FILES = ("vocab.json", "merges.txt", "special_tokens_map.json", _CONFIG)


class ClipTokenizer:
    """As CaptionTokenizer: `vocab_size`, `max_length`, `encode`, `save`. Captions start with START and end with END."""

    def __init__(self, folder, max_length: int, added: Sequence[str] = ()):
        """`added`: tokens behind those of the folder."""
        self.folder, self.max_length = Path(folder), max_length
        if max_length < 3:
            raise ConfigError(f"captions of {max_length} tokens have no room for a word; the least is 3")
        self.ids = read_json_object(self.folder / "vocab.json", ConfigError, inside=True)
        if not is_table(self.ids, int) or {*self.ids.values()} != {*range(len(self.ids))}:
            raise ConfigError(f"vocab.json in {folder} does not number its tokens from 0 on, each once; copy it again")
        try:
            lines = read_small(self.folder / "merges.txt", ConfigError, inside=True).decode().splitlines()
        except UnicodeDecodeError as error:
            raise ConfigError(f"merges.txt in {folder} is not UTF-8 text; copy it again") from error
        merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
        pad, self.mends = self._pad_token(), mends_text(self.folder)
        for token in (START, END, pad):
            if token not in self.ids:
                raise ConfigError(f"the vocabulary in {folder} lacks {token}; it is not CLIP's")
        odd = next((pair for pair in merges if len(pair) != 2 or not {*pair, "".join(pair)} <= self.ids.keys()), None)
        if odd:
            raise ConfigError(f"the merges in {folder} do not fit its vocabulary ({' '.join(odd)}); copy both again")
        self._merges, self._tokenizer = merges, _build(self.ids, merges, pad, max_length)
        own = len(self.ids)
        self.added = [*read_added(self.folder, own), *added]
        add_tokens(self._tokenizer, own, self.added)
        self.ids |= {token: number for number, token in enumerate(self.added, own)}
        self._words, self.seen = WordTokenizer(self._tokenizer), None  # which words captions have is not known

    @property
    def vocab(self) -> list[str]:
        """The tokens in the order of their ids."""
        return sorted(self.ids, key=self.ids.get)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, from 0."""
        return len(self.ids)

    @property
    def end_id(self) -> int:
        """The id of END, behind which there is padding only."""
        return self.ids[END]

    def with_tokens(self, tokens: list[str]):
        """The tokenizer that knows these too, with the next ids. Raises ConfigError."""
        known = len(read_added(self.folder, len(self.ids) - len(self.added)))
        return ClipTokenizer(self.folder, self.max_length, [*self.added[known:], *tokens])

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that no tokenizer has which gives other ids, of the same length."""
        return digest_of(["pairs", self.ids, self._merges, self._pad_token(), *([MENDS] if self.mends else [])])

    def encode(self, captions: list[str]) -> np.ndarray:
        """Token ids, int64 [len(captions), max_length]: START caption END, cut before END, padded."""
        return self._words.encode(self.read(captions))

    def measure(self, caption: str, room: int) -> tuple[int, str]:
        """As `WordTokenizer.measure`, of the text as it is read."""
        return self._words.measure(self.read([caption])[0], room)

    def read(self, captions: list[str]) -> list[str]:
        """The captions as their tokens are made of them."""
        return [*map(_mend, captions)] if self.mends else captions

    def decode(self, ids: np.ndarray) -> list[str]:
        """The texts of token ids [N, L] without special tokens, in lower case."""
        texts, pad = [], self._pad_token()
        for row in ids.tolist():
            tokens = [token for token in map(self._tokenizer.id_to_token, row) if token not in (START, END)]
            while tokens and tokens[-1] == pad:
                tokens.pop()
            tokens = [f"{token}</w>" if token in self.added else token for token in tokens]
            texts.append(ByteLevel().decode(tokens).replace("</w>", " ").strip())
        return texts

    def to_json(self) -> str:
        """The definition that Hugging Face's `tokenizers` reads."""
        return self._tokenizer.to_str()

    def unknown_words(self, captions: list[str]) -> list[str]:
        """None: all words are made of pieces, of single bytes if need be."""
        return []

    unseen_words = unknown_words

    def save(self, folder) -> None:
        """Write what `load_tokenizer` and CLIPTokenizer.from_pretrained read."""
        folder = make_output_dir(folder)
        for name in _FILES:
            if (self.folder / name).is_file():
                (folder / name).write_bytes(read_small(self.folder / name, ConfigError, inside=True))
        write_added(folder, len(self.ids) - len(self.added), self.added)
        if not (folder / _CONFIG).is_file():
            own = {"model_max_length": self.max_length, "pad_token": self._pad_token()}
            write_json(folder / _CONFIG, {"tokenizer_class": "CLIPTokenizer", **own})
        write_mends(folder, self.mends)
        self._tell_transformers(folder / _CONFIG)

    def _tell_transformers(self, path: Path) -> None:
        """Of a file that lists the added tokens, transformers reads no other."""
        config = read_json_object(path, ConfigError)
        if self.added and isinstance(listed := config.get("added_tokens_decoder"), dict):
            facts = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": False}
            more = {str(self.ids[token]): {"content": token, **facts} for token in self.added}
            write_json(path, {**config, "added_tokens_decoder": {**listed, **more}})

    def _pad_token(self) -> str:
        """The folder's own, which is END in Stable Diffusion 1 and "!" in 2."""
        for name in ("special_tokens_map.json", _CONFIG):
            path = self.folder / name
            token = read_json_object(path, ConfigError, inside=True).get("pad_token") if path.is_file() else None
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(token, str):
                raise ConfigError(f"{path}: pad_token {token!r:.80} is not a token; copy the tokenizer again")
            if token:
                return token
        return END


def _mend(text: str) -> str:
    """As transformers' CLIPTokenizer; it changes no letter of plain ASCII but to lower case."""
    plain = text.isascii() and text.isprintable() and "&" not in text
    return text if plain else " ".join(ftfy.fix_text(text).split()).lower()


def _build(ids: dict[str, int], merges: list[tuple], pad: str, max_length: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE(ids, merges, continuing_subword_prefix="", end_of_word_suffix="</w>", unk_token=END))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_WORDS, "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.post_processor = RobertaProcessing(
        (END, ids[END]), (START, ids[START]), trim_offsets=False, add_prefix_space=False
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (START, END)])
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding(length=max_length, pad_id=ids[pad], pad_token=pad)
    return tokenizer
