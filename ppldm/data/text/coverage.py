"""How well a tokenizer fits captions: words that it does not know, and captions that are longer than it takes."""

from collections import Counter
from dataclasses import dataclass, field

_UNKNOWN = "[UNK]"
_SHOWN = 60  # characters of what is cut


@dataclass
class Coverage:
    """Counts over captions. `lengths`: captions by their number of tokens, special tokens included, before cutting.
    `unknown`: words without a token, by how often they come. `empty`: captions of nothing but spaces. `lost`: what is
    cut from one of those that are too long. Two of them add up."""

    captions: int = 0
    words: int = 0
    unknown: Counter = field(default_factory=Counter)
    lengths: Counter = field(default_factory=Counter)
    empty: int = 0
    lost: str = ""

    def __add__(self, other: "Coverage") -> "Coverage":
        return Coverage(
            self.captions + other.captions,
            self.words + other.words,
            self.unknown + other.unknown,
            self.lengths + other.lengths,
            self.empty + other.empty,
            self.lost or other.lost,
        )

    @property
    def unknown_share(self) -> float:
        """Of all words, from 0 to 1."""
        return self.unknown.total() / max(1, self.words)

    def cut_share(self, max_length: int) -> float:
        """The share of captions with more than `max_length` tokens, from 0 to 1."""
        return sum(count for length, count in self.lengths.items() if length > max_length) / max(1, self.captions)

    def length_at(self, share: float) -> int:
        """The number of tokens that at least `share` of the captions do not exceed; 0 without captions."""
        covered = 0
        for length in sorted(self.lengths):
            covered += self.lengths[length]
            if covered >= share * self.captions:
                return length
        return 0

    @property
    def shown_lost(self) -> str:
        """The beginning of what is cut from a caption."""
        return f"{self.lost[:_SHOWN]!r}{'…' * (len(self.lost) > _SHOWN)}"

    def describe(self, max_length: int) -> str:
        """A sentence for the log."""
        words = f"{self.unknown_share:.1%} of their words are unknown"
        if self.unknown:
            words += f" ({', '.join(word for word, _ in self.unknown.most_common(5))})"
        if self.empty:
            words = f"{self.empty / self.captions:.1%} are empty, {words}"
        lengths = f"the median has {self.length_at(0.5)}, the longest {self.length_at(1)}"
        example = f"; one loses {self.shown_lost}" if self.lost else ""
        return f"{words}, {self.cut_share(max_length):.1%} are cut at {max_length} tokens ({lengths}{example})"


class CoverageMeter:
    """Measures captions with a CaptionTokenizer or ClipTokenizer."""

    def __init__(self, tokenizer):
        from tokenizers import Tokenizer

        self._max_length = tokenizer.max_length
        self._whole = Tokenizer.from_str(tokenizer.to_json())
        self._whole.no_truncation()
        self._whole.no_padding()
        self._read = tokenizer.read

    def measure(self, captions: list[str]) -> Coverage:
        """Counts over these captions."""
        found = Coverage(captions=len(captions), empty=sum(not caption.strip() for caption in captions))
        captions = self._read(captions)
        for caption, encoding in zip(captions, self._whole.encode_batch(captions), strict=True):
            found.lengths[len(encoding.ids)] += 1
            found.lost = found.lost or self._lost(caption, encoding)
            found.words += len({word for word in encoding.word_ids if word is not None})
            found.unknown.update(
                caption[start:end].lower()
                for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True)
                if token == _UNKNOWN and end > start
            )
        return found

    def _lost(self, text: str, encoding) -> str:
        if len(encoding.ids) <= self._max_length:
            return ""
        return text[encoding.offsets[self._max_length - 1][0] :].strip()  # the last place is the end's
