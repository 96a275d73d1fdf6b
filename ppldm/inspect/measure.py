"""What is counted of rows, in one pass over them; pictures are not decoded."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from ..data.formats.row import merge_other_text, noting_other_text
from ..data.text.captions import CaptionRule
from ..data.text.coverage import Coverage, CoverageMeter
from ..utils.errors import RowError
from .page.facts import MOST_ROWS, Facts
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
        """Count what another has counted."""
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
    """All rows of the parts that can be opened. rule: says which captions of a row are measured: all that it may
    draw."""
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
