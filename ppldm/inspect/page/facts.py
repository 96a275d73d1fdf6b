"""What rows say of themselves beside pictures and captions: languages, domains, licences, scores, copies.

What rows carry is read from their metadata by the names in common use. Copies are looked for among all rows, all else
in every `stride`-th row of each part, the first among them, so that memory and time stay bounded however many rows
there are.

A caption's language is told by its script and its commonest words: a rule to be read, not a model. The script that most
letters are of (a Han character counts as three) decides where it is of one language (kana: Japanese, though most
letters be Han). Among languages of one script, it is the one whose commonest words the caption has most of; with a tie,
or no such word, it is "other Latin", "other Cyrillic", …, as for captions that hold only names and nouns.
Measured against nothing but the tests: a share of a data set, not a label of a row.
"""

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from ...data.formats.row import Row
from ...prepare.download.hosts import host_of
from ...utils.errors import DataError

OTHER = "other "
NONE = "no letters"
_LETTERS_OF_HAN = 3  # a character is a short word

# Of each script its letters, and the language that it stands for by itself; "" where several share it.
_SCRIPTS = {
    "Latin": ("A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ", ""),
    "Cyrillic": ("Ѐ-ԯ", ""),
    "Arabic": ("ؠ-ۿݐ-ݿ", ""),
    "Greek": ("Ͱ-Ͽἀ-῿", "el"),
    "Hebrew": ("א-ת", "he"),
    "Armenian": ("Ա-և", "hy"),
    "Georgian": ("ა-ჿ", "ka"),
    "Devanagari": ("ऀ-ॿ", "hi"),
    "Bengali": ("ঀ-৿", "bn"),
    "Tamil": ("஀-௿", "ta"),
    "Thai": ("ก-๛", "th"),
    "Hangul": ("가-힣ᄀ-ᇿ㄰-㆏", "ko"),
    "Kana": ("ぁ-ヿ", "ja"),
    "Han": ("㐀-䶿一-鿿", "zh"),
}
_COMMON = {
    "en": "the of and a an in on with for to is at from by this that are it your his her as or",
    "de": "der die das und ein eine einer einem in mit auf von für im den dem zu ist am bei aus nicht sich",
    "fr": "le la les et un une des de du dans sur avec pour en au aux est par qui sont son ce",
    "es": "el la los las y un una de del en con para por al es se que su lo como más",
    "it": "il lo la gli le e un una di del della in con per su al da che nel è sono come",
    "pt": "o os as e um uma de do da em com para por no na ao que dos das é não",
    "nl": "de het een en van in op met voor te is aan bij uit door zijn naar dat niet",
    "sv": "och en ett i på med för av till är den det som från att inte",
    "da": "og en et i på med for af til er den det som fra at ikke der",
    "pl": "i w na z do się nie jest od dla po ze przez oraz za to jak",
    "cs": "v na s do se je pro od po ze za to jak z které",
    "tr": "ve bir bu için ile da de çok olan gibi ne en daha kadar",
    "id": "dan yang di dengan untuk dari ini itu pada ke sebuah adalah",
    "vi": "và của là một trong cho với các có được trên những này người",
    "ru": "и в на с не что по из для от это как к за он она",
    "uk": "і в на з не що по із для від це як до та й у",
    "bg": "и в на с не за от да се по е са това със",
    "ar": "في من على إلى مع هذا هذه عن أن التي الذي و",
    "fa": "و در از به با که این برای است را آن یک",
}  # fmt: skip
_LETTERS = {"ru": "Cyrillic", "uk": "Cyrillic", "bg": "Cyrillic", "ar": "Arabic", "fa": "Arabic"}
# Letters that only one language of its script has: each counts as a common word.
_OWN_LETTERS = {
    "uk": "іїєґ",
    "ru": "ыэё",
    "fa": "پچژگ",
    "vi": "ơưđạảấầậắằẹẻẽếềểệịọỏốồộớờợụủứừự",
    "tr": "ğıİ",
    "pl": "łżźśń",
}
_PATTERN = re.compile("|".join(f"(?P<{name}>[{letters}])" for name, (letters, _) in _SCRIPTS.items()))
_WORDS: dict[str, set[str]] = {}  # of each word, the languages that it is common in
for _language, _commonest in _COMMON.items():
    for _word in _commonest.split():
        _WORDS.setdefault(_word, set()).add(_language)

MOST = 1 << 18  # values that are kept to look for copies among them
MOST_ROWS = 500_000  # that are looked at in full, about
SHOWN = 20  # values of a table
_DIGITS = 3  # of scores
_URLS = ("url", "URL", "image_url")
_LICENCES = ("license", "licence", "LICENSE", "license_name")
_LANGUAGES = ("language", "LANGUAGE", "lang")
_COPIES = {"key": ("key",), "sha256": ("sha256",), "url": _URLS}


def find_language(caption: str) -> str:
    """A code of ISO 639-1; `OTHER` and the name of a script; `NONE` of a caption without letters of these scripts."""
    letters = Counter(found.lastgroup for found in _PATTERN.finditer(caption))
    if not letters:
        return NONE
    if letters["Kana"] and letters["Kana"] + letters["Han"] >= letters.total() / 2:
        return "ja"
    letters["Han"] *= _LETTERS_OF_HAN
    script = letters.most_common(1)[0][0]
    if language := _SCRIPTS[script][1]:
        return language
    votes = Counter()
    for word in re.findall(r"[^\W\d_]+", caption.lower()):
        votes.update(_WORDS.get(word, ()))
    for language, own in _OWN_LETTERS.items():
        votes[language] += sum(caption.count(letter) for letter in own)
    votes = [(count, name) for name, count in votes.items() if count and _LETTERS.get(name, "Latin") == script]
    most = sorted(votes, reverse=True)[:2]
    if not most or (len(most) > 1 and most[0][0] == most[1][0]):
        return OTHER + script
    return most[0][1]


@dataclass
class Copies:
    """How many values come more than once among any number of them, in bounded memory.

    Values are kept by 64-bit hashes. Once more than `MOST` different ones are kept, only those whose hash ends in a
    zero bit stay, then two, and so on: every value is kept with all its copies or not at all, and what is kept, times
    two for each bit, estimates the whole (P. Gibbons, "Distinct Sampling for Highly-Accurate Answers to Distinct Values
    Queries", 2001). What is kept depends on the values, not on their order or on how they were split.

    rows: how many values were added. bits: zero bits that a hash must end with to be kept, in `counts`."""

    rows: int = 0
    bits: int = 0
    counts: Counter = field(default_factory=Counter)

    def add(self, value: str) -> None:
        """Count one value."""
        self.rows += 1
        number = int.from_bytes(blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        if not number & ((1 << self.bits) - 1):
            self.counts[number] += 1
            self._shrink()

    def merge(self, other: "Copies") -> None:
        """Count what another has counted."""
        self.rows, self.bits = self.rows + other.rows, max(self.bits, other.bits)
        self.counts.update(other.counts)
        self._shrink(self.bits)

    def report(self) -> dict:
        """{rows, distinct, repeated: values that come more than once, extra: rows beyond the first of each,
        sampled_share: of the values, 1 where all were kept and nothing is an estimate}."""
        repeated = [count for count in self.counts.values() if count > 1]
        extra = sum(repeated) - len(repeated)
        found = {"distinct": len(self.counts), "repeated": len(repeated), "extra": extra}
        return {"rows": self.rows, **{name: count << self.bits for name, count in found.items()},
                "sampled_share": 0.5**self.bits}  # fmt: skip

    def _shrink(self, bits: int = 0) -> None:
        while bits or len(self.counts) > MOST:
            self.bits += not bits
            mask = (1 << self.bits) - 1
            self.counts = Counter({number: count for number, count in self.counts.items() if not number & mask})
            bits = 0


@dataclass
class Facts:
    """Counts over rows. stride: of the rows that are looked at in full; `looked` are these. languages: of captions, as
    found; said: as the rows say. scores: how often each number comes in a field, rounded to three digits. real: the
    fields in which a number is not whole. copies: by what rows carry, and of captions; pictures: of these, as
    `read_labels` has it, where labels were named."""

    stride: int = 1
    looked: int = 0
    captions: int = 0
    languages: Counter = field(default_factory=Counter)
    said: Counter = field(default_factory=Counter)
    domains: Counter = field(default_factory=Counter)
    licences: Counter = field(default_factory=Counter)
    fields: Counter = field(default_factory=Counter)
    scores: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    real: set[str] = field(default_factory=set)
    copies: dict[str, Copies] = field(default_factory=lambda: {name: Copies() for name in (*_COPIES, "caption")})
    pictures: dict = field(default_factory=dict)

    def add(self, number: int, row: Row, captions: list[str]) -> None:
        """Count row `number` of a part."""
        for name, fields in _COPIES.items():
            if value := _text(row.meta, fields):
                self.copies[name].add(value)
        for caption in captions:
            self.copies["caption"].add(caption)
        if number % self.stride:
            return
        self.looked += 1
        for caption in captions:
            self.captions += 1
            self.languages[find_language(caption)] += 1
        for counter, value in (
            (self.said, _text(row.meta, _LANGUAGES)),
            (self.domains, host_of(_text(row.meta, _URLS)).removeprefix("www.")),
            (self.licences, _text(row.meta, _LICENCES)),
        ):
            counter.update([value] * bool(value))
        for name, value in row.meta.items():
            self.fields[name] += 1
            if (score := _number(value)) is not None:
                self.scores[name][float(f"{score:.{_DIGITS}g}")] += 1
                if not score.is_integer():
                    self.real.add(name)

    def merge(self, other: "Facts") -> None:
        """Count what another has counted."""
        self.looked, self.captions = self.looked + other.looked, self.captions + other.captions
        for name in ("languages", "said", "domains", "licences", "fields"):
            getattr(self, name).update(getattr(other, name))
        for name, counts in other.scores.items():
            self.scores[name].update(counts)
        self.real |= other.real
        for name, copies in other.copies.items():
            self.copies[name].merge(copies)

    @property
    def shown_scores(self) -> dict[str, Counter]:
        """Those of fields with a number that is not whole."""
        return {name: self.scores[name] for name in sorted(self.real)}

    def report(self) -> dict:
        """As JSON has it."""
        tables = {name: top(getattr(self, name)) for name in ("languages", "said", "domains", "licences", "fields")}
        copies = {name: copies.report() for name, copies in self.copies.items() if copies.rows}
        copies |= {"picture": self.pictures} if self.pictures else {}
        kept = {"domains": len(self.domains), "licences": len(self.licences)}
        return {"looked": self.looked, "captions": self.captions, **tables, "different": kept, "copies": copies}


def read_labels(path: str, num_rows: int) -> dict:
    """What `Copies.report` says, of the pictures in a labels.parquet of `ppldm dedup`. Raises DataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["kept", "cluster"], partitioning=None)
        kept, clusters = table["kept"].drop_null().to_numpy(), table["cluster"].drop_null().unique()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as labels; name labels.parquet of `ppldm dedup`") from error
    if table.num_rows != num_rows:
        raise DataError(f"{path} labels {table.num_rows} rows of {num_rows}; run `ppldm dedup` on the same lists")
    distinct = int(kept.sum())
    return {"rows": len(kept), "distinct": distinct, "repeated": len(clusters), "extra": len(kept) - distinct,
            "sampled_share": 1.0}  # fmt: skip


def top(counts: Counter) -> dict[str, int]:
    """The most frequent values, of equal ones the first by name."""
    return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:SHOWN])


def _text(meta: dict, names: Iterable[str]) -> str:
    return next((str(meta[name]) for name in names if isinstance(meta.get(name), str | int) and meta[name] != ""), "")


def _number(value) -> float | None:
    """A finite number of the metadata; None for all else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > sys.float_info.max:
        return None
    return None if math.isnan(value) else float(value)
