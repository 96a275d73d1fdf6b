"""What is counted of rows, in one pass over them (pictures are not decoded): sizes, captions, reasons of bad rows; and
what rows say of themselves beside pictures and captions: languages, domains, licences, scores, copies.

What rows carry is read from their metadata by the names in common use. Copies are looked for among all rows, such facts
in every `stride`-th row of each part, which bounds memory and time.

A caption's language is told by its script and its commonest words: a rule to be read, not a model. The script that most
letters are of (a Han character counts as three) decides where it is of one language (kana: Japanese, though most
letters be Han). Among languages of one script, it is the one whose commonest words the caption has most of; with a tie,
or no such word, it is "other Latin", "other Cyrillic", …. It is a share of a data set, not a label of a row.
"""

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import yaml

from ..data.formats.row import Row, merge_other_text, noting_other_text
from ..data.text.captions import CaptionRule, Coverage, CoverageMeter
from ..prepare.download.fetch import host_of
from ..utils.errors import DataError, RowError
from ..utils.files import atomic_write
from .parts import Indexed, Span, count_not_rows, open_rows, over_rows

MEASURES = {
    "width": "width, pixels",
    "height": "height, pixels",
    "short_side": "short side, pixels",
    "aspect_ratio": "width / height",
    "image_kb": "image file, KB",
    "caption_words": "caption, words",
    "caption_chars": "caption, characters",
}
CONTROL = {"control_kb": "second image file, KB"}
TOKENS = {"caption_tokens": "caption, tokens"}  # by the first tokenizer
QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)

OTHER = "other "
NONE = "no letters"
_LETTERS_OF_HAN = 3  # a character is a short word

_KNOWN = yaml.safe_load(Path(__file__).with_name("languages.yaml").read_text(encoding="utf-8"))
_PATTERN = re.compile("|".join(f"(?P<{name}>[{letters}])" for name, (letters, _) in _KNOWN["scripts"].items()))
_WORDS: dict[str, set[str]] = {}  # of each word, the languages that it is common in
for _language, _own in _KNOWN["languages"].items():
    for _word in _own["common"].split():
        _WORDS.setdefault(_word, set()).add(_language)

MOST = 1 << 18  # values that are kept to look for copies among them
MOST_ROWS = 500_000  # that are looked at in full, about
SHOWN = 20  # values of a table
_DIGITS = 3  # of scores
_URLS = ("url", "URL", "image_url")
_LICENCES = ("license", "licence", "LICENSE", "license_name")
_LANGUAGES = ("language", "LANGUAGE", "lang")
_TABLES = ("languages", "said", "domains", "licences", "fields")
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
    if language := _KNOWN["scripts"][script][1]:
        return language
    votes = Counter()
    for word in re.findall(r"[^\W\d_]+", caption.lower()):
        votes.update(_WORDS.get(word, ()))
    known = {name: own for name, own in _KNOWN["languages"].items() if own["script"] == script}
    for language, own in known.items():
        votes[language] += sum(caption.count(letter) for letter in own.get("letters", ""))
    votes = [(count, name) for name, count in votes.items() if count and name in known]
    most = sorted(votes, reverse=True)[:2]
    if not most or (len(most) > 1 and most[0][0] == most[1][0]):
        return OTHER + script
    return most[0][1]


@dataclass
class Copies:
    """How many values come more than once among any number of them, in bounded memory.

    Values are kept by 64-bit hashes. Once more than `MOST` different ones are kept, only those whose hash ends in
    `bits` zero bits stay: every value is kept with all its copies or not at all, and what is kept, times two for each
    bit, estimates the whole (P. Gibbons, "Distinct Sampling for Highly-Accurate Answers to Distinct Values Queries",
    2001), whatever the order of values."""

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
    """Counts over rows. `looked`: rows that are looked at in full, each `stride`-th. said: languages, as the rows say.
    scores: how often each number comes in a field, to three digits; real: fields with one that is not whole. pictures:
    copies of these, as `read_labels` has it."""

    stride: int = 1
    looked: int = 0
    captions: int = 0
    tables: dict[str, Counter] = field(default_factory=lambda: {name: Counter() for name in _TABLES})
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
            self.tables["languages"][find_language(caption)] += 1
        domain = host_of(_text(row.meta, _URLS)).removeprefix("www.")
        told = {"said": _text(row.meta, _LANGUAGES), "domains": domain, "licences": _text(row.meta, _LICENCES)}
        for name, value in told.items():
            self.tables[name].update([value] * bool(value))
        for name, value in row.meta.items():
            self.tables["fields"][name] += 1
            if (score := _number(value)) is not None:
                self.scores[name][float(f"{score:.{_DIGITS}g}")] += 1
                if not score.is_integer():
                    self.real.add(name)

    def merge(self, other: "Facts") -> None:
        """Count what another has counted."""
        self.looked, self.captions = self.looked + other.looked, self.captions + other.captions
        for name, counts in other.tables.items():
            self.tables[name].update(counts)
        for name, counts in other.scores.items():
            self.scores[name].update(counts)
        self.real |= other.real
        for name, copies in other.copies.items():
            self.copies[name].merge(copies)

    @property
    def shown_scores(self) -> dict[str, Counter]:
        return {name: self.scores[name] for name in sorted(self.real)}

    def report(self) -> dict:
        tables = {name: top(counts) for name, counts in self.tables.items()}
        copies = {name: copies.report() for name, copies in self.copies.items() if copies.rows}
        copies |= {"picture": self.pictures} if self.pictures else {}
        kept = {name: len(self.tables[name]) for name in ("domains", "licences")}
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


@dataclass
class Measured:
    """Counts over rows. counts: how often each value of each measure comes. skipped, not_rows: bad rows, and what is
    not a row, by reason. coverages: of each tokenizer. facts: None where they were not asked for."""

    coverages: list[Coverage]
    facts: Facts | None = None
    counts: dict[str, Counter] = field(default_factory=lambda: {measure: Counter() for measure in MEASURES | CONTROL})
    skipped: Counter = field(default_factory=Counter)
    not_rows: Counter = field(default_factory=Counter)
    other_text: dict = field(default_factory=dict)  # as `OtherText.report`

    def merge(self, other: "Measured") -> None:
        self.coverages = [own + others for own, others in zip(self.coverages, other.coverages, strict=True)]
        self.skipped.update(other.skipped)
        self.not_rows.update(other.not_rows)
        self.other_text = merge_other_text([self.other_text, other.other_text])
        for measure, values in other.counts.items():
            self.counts[measure].update(values)
        if self.facts:
            self.facts.merge(other.facts)


def measure(
    indexed: Indexed, rule: CaptionRule, meters: Sequence[CoverageMeter], num_workers: int, with_facts: bool = False
) -> Measured:
    """All rows of the parts that can be opened. rule: says which captions of a row are measured."""
    stride = max(1, -(-indexed.num_rows // MOST_ROWS)) if with_facts else 0
    found = _begin(meters, stride)
    for _, own in over_rows(
        partial(measure_span, rule=rule, meters=meters, stride=stride), indexed, num_workers, "stats"
    ):
        found.merge(own)
    if meters:
        found.counts["caption_tokens"] = found.coverages[0].lengths
    return found


def measure_span(span: Span, rule: CaptionRule, meters: Sequence[CoverageMeter] = (), stride: int = 0) -> Measured:
    """The rows of a span. stride: facts are counted of every so many rows; 0: of none."""
    found, captions = _begin(meters, stride), []
    with closing(open_rows(span.part)) as part, noting_other_text() as noted:
        for number in range(span.start, span.stop):
            try:
                row = part.read(number)
                noted.end_row(f"{span.part.path} row {number}")
                rule.check(row)
            except RowError as error:
                found.skipped[error.reason] += 1
                noted.found.clear()
                continue
            width, height = int(part.widths[number]), int(part.heights[number])
            if width and height:
                values = [width, height, min(width, height), round(width / height, 2)]
                values += [math.ceil(len(row.image) / 1000)] * part.has_images
                for measure, value in zip(MEASURES, values, strict=False):
                    found.counts[measure][value] += 1
            elif part.has_images:
                found.skipped["image"] += 1
                continue
            found.counts["control_kb"].update([math.ceil(len(row.control) / 1000)] * bool(row.control))
            own = rule.texts(row)
            for caption in own:
                found.counts["caption_words"][len(caption.split())] += 1
                found.counts["caption_chars"][len(caption)] += 1
            captions += own
            if found.facts:
                found.facts.add(number, row, own)
        found.not_rows.update(count_not_rows(part, span))
    found.other_text = noted.report
    found.coverages = [meter.measure(captions) for meter in meters]
    return found


def _begin(meters: Sequence[CoverageMeter], stride: int) -> Measured:
    return Measured([Coverage() for _ in meters], Facts(stride) if stride else None)


def quantiles(values: Counter) -> list[float]:
    """The values at QUANTILES of all that were counted; empty where nothing was."""
    if not values:
        return []
    ordered = sorted(values)
    ends = np.cumsum([values[value] for value in ordered])
    ranks = [round(share * (int(ends[-1]) - 1)) for share in QUANTILES]
    return [ordered[int(np.searchsorted(ends, rank, side="right"))] for rank in ranks]


def draw_histograms(path, counts: dict[str, Counter], titles: dict[str, str], skipped: Counter, title: str) -> None:
    """One histogram for each measure of `titles` that was counted, and bad rows by reason, into a PNG."""
    from matplotlib.figure import Figure

    shown = [measure for measure in titles if measure in counts]
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, len(shown) // 2 + 1).ravel()
    for axis, measure in zip(axes, shown, strict=False):
        axis.set_title(titles[measure])
        axis.set_ylabel("rows")
        draw_histogram(axis, counts[measure])
    draw_reasons(axes[len(shown)], skipped)
    for axis in axes[len(shown) + 1 :]:
        axis.set_axis_off()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)


def draw_histogram(axis, values: Counter) -> None:
    """How often each value comes; of only one value, which it is."""
    axis.yaxis.get_major_locator().set_params(integer=True)
    if not values:
        return
    if len(values) == 1:
        (value,) = values
        axis.bar([f"{value:g}"], [values[value]], width=0.3, color="#4477aa")
        axis.set_xlim(-1, 1)
        return
    bins: int | np.ndarray = 40
    if all(isinstance(value, int) for value in values):
        # Each bin takes as many whole numbers, or the picture would show teeth that are not there.
        axis.xaxis.get_major_locator().set_params(integer=True)
        low, high = min(values), max(values)
        step = max(1, math.ceil((high - low + 1) / 40))
        bins = np.arange(low, high + step + 1, step) - 0.5
    axis.hist(list(values), bins=bins, weights=list(values.values()), color="#4477aa")


def draw_reasons(axis, skipped: Counter) -> None:
    """The most frequent reasons of bad rows as bars; nothing where there are none."""
    if not skipped:
        axis.set_axis_off()
        return
    reasons = skipped.most_common(8)[::-1]
    axis.barh([reason for reason, _ in reasons], [count for _, count in reasons], color="#bb3333")
    axis.set_title("bad rows, by reason")
    axis.set_xlabel("rows")
    axis.xaxis.get_major_locator().set_params(integer=True)
