"""Captions to token ids: BERT's WordPiece in Rust, with the ids that PaddleNLP's BertTokenizer gives
for every character that both know (their Unicode tables differ in age).

A tokenizer is a `vocab.txt`, one token a line, the line number its id, and whether text is lower-cased; with it may
come `words.txt`, all words of the captions that are trained on.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, Sequence, Split
from tokenizers.processors import BertProcessing

from ...config.clip_vocabulary import CLIP_PADDING, vocabulary_folder
from ...utils.checksums import digest_of
from ...utils.errors import ConfigError
from ...utils.files import make_output_dir, read_json_object, read_small, write_json, write_text
from ...utils.processes.rank_watch import barrier
from ...utils.processes.world import World
from ...utils.variables import is_offline, set_for_libraries
from .words import WordTokenizer, add_tokens, read_added, write_added

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


class CaptionTokenizer:
    """A vocabulary, and tokens `added` behind it, with the length that captions are padded or cut to. `vocab_size`,
    `max_length`: int. `seen`: all words of the captions that are trained on, as `count_words` has them; None where that
    is not known."""

    def __init__(
        self, vocab: list[str], max_length: int, lower_case: bool = True, added: Iterable[str] = (),
        seen: Iterable[str] | None = None,
    ):  # fmt: skip
        ids = {token: number for number, token in enumerate(vocab)}
        _require_special(ids, "the vocabulary")
        if max_length < 3:
            raise ConfigError(f"captions of {max_length} tokens have no room for a word; the least is 3")
        self.vocab, self.max_length, self.lower_case = [*vocab, *added], max_length, lower_case
        self._own, self.added = vocab, list(added)
        self.seen = None if seen is None else frozenset(seen)
        self._tokenizer = _build(ids, max_length, lower_case)
        add_tokens(self._tokenizer, len(vocab), added)
        self._words = WordTokenizer(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, from 0."""
        return len(self.vocab)

    @property
    def end_id(self) -> int:
        """The id of [SEP], behind which there is padding only."""
        return self.vocab.index(_SEP)

    def with_tokens(self, tokens: list[str]):
        """The tokenizer that knows these too, with the next ids. Raises ConfigError."""
        return CaptionTokenizer(self._own, self.max_length, self.lower_case, [*self.added, *tokens], self.seen)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that no tokenizer has which gives other ids, of the same length."""
        return digest_of(["wordpiece", self.vocab, self.lower_case])

    def encode(self, captions: list[str]) -> np.ndarray:
        """Token ids, int64 [len(captions), max_length]: [CLS] caption [SEP], cut before [SEP], padded with [PAD]."""
        return self._words.encode(captions)

    def measure(self, caption: str, room: int) -> tuple[int, str]:
        """As `WordTokenizer.measure`."""
        return self._words.measure(caption, room)

    def read(self, captions: list[str]) -> list[str]:
        """The captions as their tokens are made of them: as they are."""
        return captions

    def decode(self, ids: np.ndarray) -> list[str]:
        """The texts of token ids [N, L] without special tokens, in lower case where the tokenizer makes it."""
        texts = []
        for row in ids.tolist():
            tokens = [self.vocab[number] for number in row]
            texts.append(" ".join(token for token in tokens if token not in (_PAD, _CLS, _SEP)).replace(" ##", ""))
        return texts

    def to_json(self) -> str:
        """The definition that Hugging Face's `tokenizers` reads."""
        return self._tokenizer.to_str()

    def unknown_words(self, captions: list[str]) -> list[str]:
        """The words that the vocabulary lacks, or that are not `seen`, each once, in order."""
        found = dict.fromkeys(self.unseen_words(captions))
        for caption, encoding in zip(captions, self._tokenizer.encode_batch(captions), strict=True):
            pairs = zip(encoding.tokens, encoding.offsets, strict=True)
            lacking = (caption[start:end] for token, (start, end) in pairs if token == _UNK)
            found |= dict.fromkeys(word for word in lacking if word.lower() not in found)
        return list(found)

    def unseen_words(self, captions: list[str]) -> list[str]:
        """The words that are not `seen`, in lower case, each once, in order; none where that is not known."""
        if self.seen is None:
            return []
        for token in self.added:
            captions = [caption.replace(token, " ") for caption in captions]
        return [word for word in count_words(captions) if word not in self.seen and any(map(str.isalnum, word))]

    def save(self, folder) -> None:
        """Write what `load_tokenizer`, and BertTokenizer.from_pretrained of PaddleNLP, reads."""
        folder = make_output_dir(folder)
        names = dict(
            zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True)
        )
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
    ClipTokenizer of a folder with merges.txt, or of a name in CLIP_PADDING. Raises ConfigError."""
    check_tokenizer(name_or_path)
    name, path = str(name_or_path), Path(name_or_path)
    if not path.exists():
        if name in KNOWN_NAMES:
            return CaptionTokenizer(*_fetch(name, max_length, is_offline(offline)))
        if name in CLIP_PADDING:
            path = vocabulary_folder(name)
    if (path / "merges.txt").is_file():
        from .clip_tokenizer import ClipTokenizer

        return ClipTokenizer(path, max_length)
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
    normalizer, splitter = _normalizer(lower_case=True), _splitter()
    return Counter(
        word for caption in captions for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(caption))
    )


def build_vocab(captions: Iterable[str]) -> list[str]:
    """A vocabulary for a small data set, with every word whole: special tokens, the captions' characters, alone and as
    ## pieces, then their words. Each group is sorted, so that the same captions in any order give the same ids."""
    words = sorted(count_words(captions))
    characters = sorted(set("".join(words)))
    return list(dict.fromkeys([*SPECIAL_TOKENS, *characters, *(f"##{char}" for char in characters), *words]))


def _build(ids: dict[str, int], max_length: int, lower_case: bool) -> Tokenizer:
    tokenizer = Tokenizer(WordPiece(ids, unk_token=_UNK, max_input_chars_per_word=100))
    tokenizer.normalizer = _normalizer(lower_case)
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.post_processor = BertProcessing((_SEP, ids[_SEP]), (_CLS, ids[_CLS]))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding(length=max_length, pad_id=ids[_PAD], pad_token=_PAD)
    return tokenizer


def _normalizer(lower_case: bool) -> BertNormalizer:
    return BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case)


def _splitter() -> Sequence:
    return Sequence([BertPreTokenizer(), Split(_LONE_CHARACTERS, "isolated")])


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
