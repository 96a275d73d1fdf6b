"""Captions to token ids, by tokenizers in Rust, which see each word once.

Nothing that a tokenizer of ours does reaches across a space: a caption's ids are those of its parts between spaces, one
after the other, and the parts of captions repeat. A caption in a script without spaces is one part, seldom kept.

BERT's WordPiece is a `vocab.txt`, one token a line, the line number its id, and whether text is lower-cased; with it
may come `words.txt`, all words of the captions that are trained on. Its ids are those of PaddleNLP's BertTokenizer for
every character that both know (their Unicode tables differ in age).

CLIP's is a folder with `vocab.json` (token to id) and `merges.txt` (pairs, the most frequent first), with the ids of
transformers' CLIPTokenizerFast. Text is mended by ftfy, as CLIP was trained; not where tokenizer_config.json says
`"ftfy": false`, or says nothing beside a model that ppldm trained. It is normalised (NFC), lower-cased, cut into words,
numbers, and runs of other characters, and each is merged by pairs (Radford et al. 2021, arXiv:2103.00020, section 2.4).
T5's is in `t5_tokenizer`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.processors import BertProcessing, RobertaProcessing

from ...config.network_files import CLIP_PADDING, END, MENDS, START, mends_text, pieces_file, write_mends
from ...config.network_files import TOKENIZER_CONFIG as _CONFIG
from ...utils.checksums import digest_of
from ...utils.errors import ConfigError
from ...utils.files import is_table, make_output_dir, read_json_object, read_small, write_json, write_text
from ...utils.processes.ranks import World, barrier
from ...utils.variables import is_offline, set_for_libraries

# What is kept of parts, some 250 bytes each. Those with more characters are addresses, or texts without spaces.
_MAX_PARTS, _MAX_CHARACTERS = 1 << 16, 32
_MOST_ADDED = 10_000  # what the Rust library takes of them grows by their square
ADDED_FILE = "added_tokens.json"  # token to id, as transformers and PaddleNLP have it
# The loader's workers are the parallelism: threads of the Rust library do not survive their fork.
set_for_libraries({"TOKENIZERS_PARALLELISM": "false"})
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PAD, _UNK, _CLS, _SEP, _MASK = SPECIAL_TOKENS
# Names that PaddleNLP knows, and the class of its tokenizer.
KNOWN_NAMES = {
    "bert-base-uncased": "BertTokenizer",
    "bert-base-chinese": "BertTokenizer",
    "ernie-1.0": "ErnieTokenizer",
}
WORDS_FILE = "words.txt"
# Of captions with more different words, or with rows that were not read, none are kept: a list that is not whole would
# name words that a model knows.
MOST_WORDS = 50_000
# Beside punctuation, PaddleNLP makes every Unicode symbol (currency, arrows, emoji …) and these letters words.
_LONE_CHARACTERS = Regex(r"[\p{P}\p{S}\u00ad²ºµØŋƱ〇]")
_SPLITTER = pre_tokenizers.Sequence(
    [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Split(_LONE_CHARACTERS, "isolated")]
)
_WORDS = Regex(r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+""")
_FILES = ("vocab.json", "merges.txt", "special_tokens_map.json", _CONFIG)


def read_added(folder: Path, vocab_size: int) -> list[str]:
    """The tokens that a tokenizer's folder adds behind its vocabulary, by their ids. Raises ConfigError."""
    path = folder / ADDED_FILE
    ids = read_json_object(path, ConfigError, inside=True) if path.is_file() else {}
    if not is_table(ids, int):
        raise ConfigError(f"{path} does not give a whole number to each token; copy the tokenizer again")
    if len(ids) > _MOST_ADDED:
        raise ConfigError(f"{path} adds {len(ids):,} tokens; at most {_MOST_ADDED:,} are taken behind a vocabulary")
    added = sorted((number, token) for token, number in ids.items() if number >= vocab_size)
    if [number for number, _ in added] != [*range(vocab_size, vocab_size + len(added))]:
        raise ConfigError(f"the ids in {path} do not follow those of its vocabulary; copy the tokenizer again")
    return [token for _, token in added]


def write_added(folder: Path, vocab_size: int, added: Sequence[str]) -> None:
    """Write what `read_added` reads; nothing where nothing is added."""
    if added:
        write_json(folder / ADDED_FILE, {token: number for number, token in enumerate(added, vocab_size)})


class WordTokenizer:
    """The ids that a Rust tokenizer gives, in a fraction of its time. tokenizer: puts one or no special token before a
    caption, and `end` behind it. pad: what captions are padded with to `max_length`, or else cut, before `end`.
    unknown: the token of what the vocabulary lacks, if any. `vocab`: the tokens by their ids, those `added` last.
    `whole`: the Rust tokenizer that neither pads nor cuts. `start`: the place of a caption's first word. `seen`: all
    words of the captions that are trained on, as `count_words` has them; None where that is not known. `runs`: of added
    tokens that stand for several the text of all of them."""

    seen: frozenset[str] | None = None
    runs: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, tokenizer: Tokenizer, vocab: list[str], added: Sequence[str], max_length: int, pad: str, end: str,
        unknown: str | None = None,
    ):  # fmt: skip
        if max_length < 3:
            raise ConfigError(f"captions of {max_length} tokens have no room for a word; the least is 3")
        # Whole wherever they stand in a text, and as they are written.
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
        for number, token in enumerate(added, len(vocab)):
            if tokenizer.token_to_id(token) != number or any(character.isspace() for character in token):
                raise ConfigError(f"the token {token!r} cannot be added: it is there, or has spaces; choose another")
        self.vocab, self.added, self.max_length = [*vocab, *added], list(added), max_length
        self._of_added = re.compile(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})")
        self.end_id = tokenizer.token_to_id(end)  # behind which there is padding only
        self.unknown_id = None if unknown is None else tokenizer.token_to_id(unknown)
        self.whole = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.enable_truncation(max_length)
        tokenizer.enable_padding(length=max_length, pad_id=tokenizer.token_to_id(pad), pad_token=pad)
        self._tokenizer, self._known = tokenizer, {}
        self._empty = np.array(tokenizer.encode("").ids, dtype=np.int64)  # first token if any, last token, padding
        self.start = int(np.argmax(self._empty == self.end_id))

    @property
    def vocab_size(self) -> int:
        """The number of token ids, from 0."""
        return len(self.vocab)

    @property
    def room(self) -> int:
        """The most tokens of a caption that have a place, without the first and the last."""
        return self.max_length - self.start - 1

    def read(self, captions: list[str]) -> list[str]:
        """The captions as their tokens are made of them."""
        if not self.runs:
            return captions
        return [self._of_added.sub(lambda match: self.runs.get(match[0], match[0]), caption) for caption in captions]

    def unknown_words(self, captions: list[str]) -> list[str]:
        """The words, or parts of them, that the vocabulary lacks, or that are not `seen`, each once, in order."""
        found = dict.fromkeys(self.unseen_words(captions))
        for caption, encoding in zip(captions, self._tokenizer.encode_batch(captions), strict=True):
            pairs = zip(encoding.ids, encoding.offsets, strict=True)
            lacking = (caption[start:end] for number, (start, end) in pairs if number == self.unknown_id)
            found |= dict.fromkeys(word for word in lacking if word.lower() not in found)
        return list(found)

    def unseen_words(self, captions: list[str]) -> list[str]:
        """The words that are not `seen`, in lower case, each once, in order; none where that is not known."""
        return []

    def encode(self, captions: list[str]) -> np.ndarray:
        """Token ids, int64 [len(captions), max_length]."""
        rows = np.tile(self._empty, (len(captions), 1))
        parts = [caption.split(" ") for caption in self.read(captions)]
        ids = self._ids_of(dict.fromkeys(chain.from_iterable(parts)))
        for row, caption in zip(rows, parts, strict=True):
            found = list(chain.from_iterable([ids[part] for part in caption]))[: self.room]
            end = self.start + len(found)
            row[self.start : end], row[end] = found, self.end_id
        return rows

    def measure(self, caption: str, room: int) -> tuple[int, str]:
        """(its tokens, without the first and the last; the text behind as many as there is room for)."""
        (caption,) = self.read([caption])
        encoding = self.whole.encode(caption, add_special_tokens=False)
        return len(encoding.ids), caption[encoding.offsets[room][0] :] if len(encoding.ids) > room else ""

    def _ids_of(self, parts: dict[str, None]) -> dict[str, list[int]]:
        ids = {part: self._known[part] for part in parts if part in self._known}
        new = [part for part in parts if part not in ids]
        if new:
            encoded = self.whole.encode_batch(new, add_special_tokens=False)
            found = {part: encoding.ids for part, encoding in zip(new, encoded, strict=True)}
            if len(self._known) + len(found) > _MAX_PARTS:
                self._known = {}
            self._known.update((part, ids) for part, ids in found.items() if len(part) <= _MAX_CHARACTERS)
            ids |= found
        return ids


class CaptionTokenizer(WordTokenizer):
    """Of a vocabulary: captions begin with [CLS], end with [SEP] and are padded with [PAD]."""

    def __init__(
        self, vocab: list[str], max_length: int, lower_case: bool = True, added: Iterable[str] = (),
        seen: Iterable[str] | None = None,
    ):  # fmt: skip
        ids = {token: number for number, token in enumerate(vocab)}
        _require_special(ids, "the vocabulary")
        self._own, self.lower_case = vocab, lower_case
        self.seen = None if seen is None else frozenset(seen)
        super().__init__(_build_pieces(ids, lower_case), vocab, [*added], max_length, _PAD, _SEP, _UNK)

    def with_tokens(self, tokens: list[str]):
        """The tokenizer that knows these too, with the next ids. Raises ConfigError."""
        return CaptionTokenizer(self._own, self.max_length, self.lower_case, [*self.added, *tokens], self.seen)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that no tokenizer has which gives other ids, of the same length."""
        return digest_of(["wordpiece", self.vocab, self.lower_case])

    def decode(self, ids: np.ndarray) -> list[str]:
        """The texts of token ids [N, L] without special tokens, in lower case where the tokenizer makes it."""
        texts = []
        for row in ids.tolist():
            tokens = [self.vocab[number] for number in row]
            texts.append(" ".join(token for token in tokens if token not in (_PAD, _CLS, _SEP)).replace(" ##", ""))
        return texts

    def unseen_words(self, captions: list[str]) -> list[str]:
        if self.seen is None:
            return []
        for token in self.added:
            captions = [caption.replace(token, " ") for caption in captions]
        return [word for word in count_words(captions) if word not in self.seen and any(map(str.isalnum, word))]

    def save(self, folder) -> None:
        """Write what `load_tokenizer`, and BertTokenizer.from_pretrained of PaddleNLP, reads."""
        folder = make_output_dir(folder)
        names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS}
        write_text(folder / "vocab.txt", "".join(f"{token}\n" for token in self._own))
        write_added(folder, len(self._own), self.added)
        if self.seen is None:
            (folder / WORDS_FILE).unlink(missing_ok=True)  # of another
        else:
            write_text(folder / WORDS_FILE, "".join(f"{word}\n" for word in sorted(self.seen)))
        write_json(folder / "special_tokens_map.json", names)
        config = {"do_lower_case": self.lower_case, "model_max_length": self.max_length, **names}
        write_json(folder / "tokenizer_config.json", {**config, "tokenizer_class": "BertTokenizer"})


def load_tokenizer(name_or_path, max_length: int, offline: bool = False):
    """The CaptionTokenizer of a folder with vocab.txt, of a vocabulary file, or of one of KNOWN_NAMES; the
    ClipTokenizer of a folder with merges.txt, or of a name in CLIP_PADDING; the T5Tokenizer of a folder with
    spiece.model, or with tokenizer.json alone. Raises ConfigError."""
    check_tokenizer(name_or_path)
    name, path = str(name_or_path), Path(name_or_path)
    if not path.exists():
        if name in KNOWN_NAMES:
            return CaptionTokenizer(*_fetch(name, max_length, is_offline(offline)))
        if name in CLIP_PADDING:
            from ...config.network_files import vocabulary_folder

            path = vocabulary_folder(name)
    if (path / "merges.txt").is_file():
        return ClipTokenizer(path, max_length)
    if pieces_file(path):
        return resolve_name("ppldm.data.text.t5_tokenizer.T5Tokenizer")(path, max_length)
    if path.is_dir():
        vocab = _read_vocab(path / "vocab.txt", inside=True)
        seen = _read_lines(path / WORDS_FILE, True) if (path / WORDS_FILE).is_file() else None
        return CaptionTokenizer(vocab, max_length, _read_lower_case(path), read_added(path, len(vocab)), seen)
    return CaptionTokenizer(_read_vocab(path), max_length, _read_lower_case(path.parent))


def check_tokenizer(name_or_path) -> None:
    """Raises ConfigError where this is neither a folder or file that is there, nor a known name."""
    known = (*KNOWN_NAMES, *CLIP_PADDING)
    if not Path(name_or_path).exists() and str(name_or_path) not in known:
        raise ConfigError(
            f"no tokenizer {name_or_path}: neither a folder with vocab.txt, nor a vocab.txt, nor one of "
            f"{', '.join(known)}; `ppldm vocab` makes one from captions"
        )


def count_words(captions: Iterable[str]) -> Counter:
    """How often each word comes, after normalising and splitting as a lower-casing CaptionTokenizer does."""
    normalize, split = _normalizer(lower_case=True).normalize_str, _SPLITTER.pre_tokenize_str
    return Counter(word for caption in captions for word, _ in split(normalize(caption)))


def build_vocab(captions: Iterable[str]) -> list[str]:
    """A vocabulary for a small data set, with every word whole: special tokens, the captions' characters, alone and as
    ## pieces, then their words. Each group is sorted, so that the same captions in any order give the same ids."""
    words = sorted(count_words(captions))
    characters = sorted(set("".join(words)))
    return list(dict.fromkeys([*SPECIAL_TOKENS, *characters, *(f"##{char}" for char in characters), *words]))


def _build_pieces(ids: dict[str, int], lower_case: bool) -> Tokenizer:
    tokenizer = Tokenizer(WordPiece(ids, unk_token=_UNK, max_input_chars_per_word=100))
    tokenizer.normalizer = _normalizer(lower_case)
    tokenizer.pre_tokenizer = _SPLITTER
    tokenizer.post_processor = BertProcessing((_SEP, ids[_SEP]), (_CLS, ids[_CLS]))
    tokenizer.add_special_tokens([*SPECIAL_TOKENS])
    return tokenizer


def _normalizer(lower_case: bool) -> BertNormalizer:
    return BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case)


def _read_lines(path: Path, inside: bool) -> list[str]:
    try:
        text = read_small(path, ConfigError, "name a folder that has a vocabulary", inside).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; name the folder of a tokenizer") from error
    return text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n").split("\n")


def _read_vocab(path: Path, inside: bool = False) -> list[str]:
    vocab = _read_lines(path, inside)
    _require_special({*vocab}, f"the vocabulary {path}")
    return vocab


def _require_special(vocab, named: str) -> None:
    if missing := [token for token in SPECIAL_TOKENS if token not in vocab]:
        raise ConfigError(f"{named} lacks {', '.join(missing)}; it must hold {' '.join(SPECIAL_TOKENS)}")


def _read_lower_case(folder: Path) -> bool:
    """As PaddleNLP: true where the folder does not say."""
    path = folder / "tokenizer_config.json"
    lower = read_json_object(path, ConfigError, inside=True).get("do_lower_case") if path.is_file() else None
    if lower not in (True, False, None):
        raise ConfigError(f"{path}: do_lower_case {lower!r:.80} must be true or false; correct it")
    return lower is not False


def _fetch(name: str, max_length: int, offline: bool) -> tuple[list[str], int, bool]:
    """The arguments of a CaptionTokenizer by name: from PaddleNLP's cache, into which only rank 0 downloads."""
    import paddlenlp.transformers
    from paddlenlp.utils.env import MODEL_HOME

    tokenizer_class = getattr(paddlenlp.transformers, KNOWN_NAMES[name])
    address = tokenizer_class.pretrained_resource_files_map["vocab_file"][name]
    cached = Path(MODEL_HOME, name, address.rpartition("/")[2])
    if offline and not cached.is_file():
        raise ConfigError(
            f"the tokenizer {name} is not in the cache ({cached}), and the network is not to be used; give a folder "
            "with its vocab.txt, or load it once without --offline"
        )
    world = World.detect()
    if not world.is_main:
        barrier(world)
    try:
        tokenizer = tokenizer_class.from_pretrained(name)
    except OSError as error:
        raise ConfigError(
            f"the tokenizer {name} could not be downloaded; give a local folder with its vocab.txt instead of the "
            "name, or make one from the captions with `ppldm vocab`"
        ) from error
    if world.is_main:
        barrier(world)
    tokens = tokenizer.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
    return tokens, max_length, tokenizer.do_lower_case


class ClipTokenizer(WordTokenizer):
    """Of a folder, and tokens `added` behind those of it. Words are made of pieces, if need be of single bytes."""

    def __init__(self, folder, max_length: int, added: Sequence[str] = ()):
        self.folder, self.mends = Path(folder), mends_text(Path(folder))
        self._ids = read_json_object(self.folder / "vocab.json", ConfigError, inside=True)
        if not is_table(self._ids, int) or {*self._ids.values()} != {*range(len(self._ids))}:
            raise ConfigError(f"vocab.json in {folder} does not number its tokens from 0 on, each once; copy it again")
        self._pad = _read_pad_token(self.folder)
        for token in (START, END, self._pad):
            if token not in self._ids:
                raise ConfigError(f"the vocabulary in {folder} lacks {token}; it is not CLIP's")
        self._merges = _read_merges(self.folder, self._ids)
        added = [*read_added(self.folder, len(self._ids)), *added]
        vocab = sorted(self._ids, key=self._ids.__getitem__)
        super().__init__(_build_pairs(self._ids, self._merges), vocab, added, max_length, self._pad, END)

    def with_tokens(self, tokens: list[str]):
        """The tokenizer that knows these too, with the next ids. Raises ConfigError."""
        known = len(read_added(self.folder, len(self._ids)))
        return ClipTokenizer(self.folder, self.max_length, [*self.added[known:], *tokens])

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that no tokenizer has which gives other ids, of the same length."""
        ids = {token: number for number, token in enumerate(self.vocab)}
        return digest_of(["pairs", ids, self._merges, self._pad, *([MENDS] if self.mends else [])])

    def read(self, captions: list[str]) -> list[str]:
        captions = super().read(captions)
        if not self.mends or not self.added:
            return [*map(_mend, captions)] if self.mends else captions
        parts = map(self._of_added.split, captions)  # every other one is added, and stays as it is
        return [" ".join(_mend(one) if n % 2 == 0 else one for n, one in enumerate(own)) for own in parts]

    def decode(self, ids: np.ndarray) -> list[str]:
        """The texts of token ids [N, L] without special tokens, in lower case."""
        texts = []
        for row in ids.tolist():
            tokens = [token for token in map(self._tokenizer.id_to_token, row) if token not in (START, END)]
            while tokens and tokens[-1] == self._pad:
                tokens.pop()
            tokens = [f"{token}</w>" if token in self.added else token for token in tokens]
            texts.append(ByteLevel().decode(tokens).replace("</w>", " ").strip())
        return texts

    def save(self, folder) -> None:
        """Write what `load_tokenizer` and CLIPTokenizer.from_pretrained read."""
        folder = make_output_dir(folder)
        for name in _FILES:
            if (self.folder / name).is_file():
                (folder / name).write_bytes(read_small(self.folder / name, ConfigError, inside=True))
        write_added(folder, len(self._ids), self.added)
        if not (folder / _CONFIG).is_file():
            own = {"model_max_length": self.max_length, "pad_token": self._pad}
            write_json(folder / _CONFIG, {"tokenizer_class": "CLIPTokenizer", **own})
        write_mends(folder, self.mends)
        config = read_json_object(folder / _CONFIG, ConfigError)
        # Of a file that lists the added tokens, transformers reads no other.
        if self.added and isinstance(listed := config.get("added_tokens_decoder"), dict):
            facts = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": False}
            behind = enumerate(self.added, len(self._ids))
            more = {str(number): {"content": token, **facts} for number, token in behind}
            write_json(folder / _CONFIG, {**config, "added_tokens_decoder": {**listed, **more}})


def _read_pad_token(folder: Path) -> str:
    """The folder's own, which is END in Stable Diffusion 1 and "!" in 2."""
    for name in ("special_tokens_map.json", _CONFIG):
        path = folder / name
        token = read_json_object(path, ConfigError, inside=True).get("pad_token") if path.is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise ConfigError(f"{path}: pad_token {token!r:.80} is not a token; copy the tokenizer again")
        if token:
            return token
    return END


def _mend(text: str) -> str:
    """As transformers' CLIPTokenizer; it changes no letter of plain ASCII but to lower case."""
    if text.isascii() and text.isprintable() and "&" not in text:
        return text
    import ftfy

    return " ".join(ftfy.fix_text(text).split()).lower()


def _read_merges(folder: Path, ids: dict[str, int]) -> list[tuple]:
    try:
        lines = read_small(folder / "merges.txt", ConfigError, inside=True).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"merges.txt in {folder} is not UTF-8 text; copy it again") from error
    merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
    odd = next((pair for pair in merges if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys()), None)
    if odd:
        raise ConfigError(f"the merges in {folder} do not fit its vocabulary ({' '.join(odd)}); copy both again")
    return merges


def _build_pairs(ids: dict[str, int], merges: list[tuple]) -> Tokenizer:
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
    tokenizer.add_special_tokens([START, END])
    return tokenizer
