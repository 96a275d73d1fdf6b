"""A WordPiece vocabulary of a given size, learned from how often words come (Schuster and Nakajima 2012; pieces are
found as in byte-pair encoding, Sennrich et al. 2016, arXiv:1508.07909, by Hugging Face's `tokenizers`): special tokens,
single characters, then the most useful pieces and words; the same for the same counts, to the token."""

import re
from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer

from ...utils.errors import ConfigError
from .captions import VOCABULARY_SIZE
from .tokenizer import SPECIAL_TOKENS, CaptionTokenizer, count_words

# The trainer reads each word as often as it counts; more than this many it would read for minutes.
_MAX_WORDS = 20_000_000
_SHORTEST, _LONGEST = 16, 77  # tokens of a caption
_CHINESE = re.compile("[\u3400-\u9fff]")
_WORDS_PER_TEXT = 1000
_MAX_WORD_LENGTH = 100  # as in BERT: longer words are unknown
_ASCII = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isupper()]
# The 3,755 most used characters of simplified Chinese: GB/T 2312, rows 16 to 55.
_GB2312 = bytes(byte for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF) for byte in (row, cell))
# The single-character tokens that a vocabulary for a language has, whether the captions have them or not: of English
# letters and digits, as words and inside of them; each Chinese character is a word of its own; and punctuation.
LANGUAGES = {
    "en": [*_ASCII, *(f"##{char}" for char in _ASCII if char.isalnum())],
    "zh": [*"，。！？、；：（）《》“”‘’…—·", *_GB2312.decode("gb2312", errors="ignore")],
}


def languages_of(captions: Iterable[str]) -> list[str]:
    """Which of LANGUAGES captions are in."""
    return ["en", "zh"] if any(map(_CHINESE.search, captions)) else ["en"]


def length_of(captions: Iterable[str]) -> int:
    """Tokens that the longest caption takes where each word is one, and some more: a multiple of 8, from 16 to 77."""
    longest = max(count_words([caption]).total() for caption in dict.fromkeys(captions))
    return max(_SHORTEST, min(_LONGEST, -(-(longest + 2) * 5 // 4 // 8) * 8))


def learn_tokenizer(captions: list[str]) -> CaptionTokenizer:
    """A tokenizer whose vocabulary, languages and length are those of captions."""
    vocabulary = learn_vocabulary(count_words(captions), VOCABULARY_SIZE, languages_of(captions))
    return CaptionTokenizer(vocabulary, length_of(captions))


def learn_vocabulary(counts: Counter, size: int, languages: list[str]) -> list[str]:
    """At most `size` tokens for words that come as often as `counts` says (as `count_words` makes them). Characters of
    `languages` (of LANGUAGES) are always in it; those of the words in the order of how often they come, for as long as
    there is room. Raises ConfigError where `size` has no room for the characters asked for."""
    required = dict.fromkeys(SPECIAL_TOKENS) | dict.fromkeys(token for name in languages for token in LANGUAGES[name])
    if size < len(required):
        raise ConfigError(
            f"--size {size} has no room for the special tokens and the characters of {', '.join(languages)}; give at "
            f"least {len(required)}"
        )
    counts = Counter({word: count for word, count in counts.items() if len(word) <= _MAX_WORD_LENGTH})
    characters = list(dict.fromkeys([*required, *_characters_by_frequency(counts)]))[:size]
    known = set(characters)
    # The single-character tokens that the trainer has of a word: all as they are, all but the first as ## pieces.
    counts = {
        word: count
        for word, count in counts.items()
        if known.issuperset(word) and known.issuperset(f"##{char}" for char in word[1:])
    }
    if not counts:
        return characters
    # The trainer numbers what it is given first in that order, and all else by count. Were the characters left to it,
    # it would number them by the order of a hash table, and settle ties by these numbers.
    trainer = WordPieceTrainer(
        vocab_size=size, min_frequency=1, special_tokens=characters, continuing_subword_prefix="##", show_progress=False
    )
    tokenizer = Tokenizer(WordPiece({}, unk_token=SPECIAL_TOKENS[1]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.train_from_iterator(_texts(counts), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.get)


def _characters_by_frequency(counts: Counter) -> list[str]:
    """Single-character tokens, the most frequent first; of characters that come alike often, the smaller code first."""
    tokens = Counter()
    for word, count in counts.items():
        for place, char in enumerate(word):
            tokens[f"##{char}" if place else char] += count
    # A character that was seen inside words only may begin the word of a prompt.
    for char in {token[-1] for token in tokens}:
        tokens.setdefault(char, 1)
    return sorted(tokens, key=lambda token: (-tokens[token], token))


def _texts(counts: dict[str, int]):
    """Texts in which each word comes as often as it counts, scaled down where that is too much to read."""
    scale = min(1.0, _MAX_WORDS / sum(counts.values()))
    for word in sorted(counts):
        left = max(1, round(counts[word] * scale))
        while left > 0:
            yield " ".join([word] * min(left, _WORDS_PER_TEXT))
            left -= _WORDS_PER_TEXT
