"""`ppldm stats`: what is in the parts: rows, sizes, caption lengths, and the reasons why rows are bad.

With a tokenizer, captions are counted in tokens too, and the words that it does not know. With `--buckets`, which
shapes the rows would be trained in, and what of them is cut away.

Images are not decoded: their sizes come from the index, their bytes and captions from the rows.
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Annotated

import numpy as np

from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.shapes import describe as describe_shapes
from ..data.text.captions import CaptionRule
from ..data.text.coverage import Coverage, CoverageMeter
from ..utils.errors import ConfigError, RowError
from ..utils.files import atomic_write
from ..utils.processes.workers import check_workers
from ..utils.report import print_report
from .cached import describe_survey, survey
from .parts import (
    Indexed,
    Span,
    check_output,
    count_not_rows,
    describe_bad_parts,
    describe_not_rows,
    index_parts,
    list_parts,
    open_rows,
    over_rows,
)

_QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
_MEASURES = {
    "width": "width, pixels",
    "height": "height, pixels",
    "short_side": "short side, pixels",
    "aspect_ratio": "width / height",
    "image_kb": "image file, KB",
    "caption_words": "caption, words",
    "caption_chars": "caption, characters",
}
_Words = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "KEY=VALUE"}]
_TOKENS = {"caption_tokens": "caption, tokens"}


def stats(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, or lists of filelists
    out: str = "",  # write histograms to this PNG
    tokenizer: str = "",  # folder with a tokenizer (`ppldm vocab` makes one): also count tokens and unknown words
    max_length: int = 77,  # with --tokenizer: tokens of a caption, as --model_max_length; longer ones are cut
    buckets: str = "",  # ratios, steps or a list of width x height: also count rows by shape (docs/shapes.md)
    settings: _Words = (),  # with --buckets: further settings of a run's data, as resolution=512 bucket_step=64
    sheet: str = "",  # with --buckets: draw rows of every shape, and what is cut of them, to this PNG
    chart: str = "",  # with --buckets: draw how many rows have which shape to this PNG
    captions: str = "",  # measure these texts of a row, as --captions of training: caption:0.5,caption_blip:0.5
    clean_captions: bool = False,  # measure captions cleaned, as training with --clean_captions sees them
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data_format.md)
    latents_dir: str = "",  # folder with the files of latents and text embeddings; by default they lie beside parts
    num_workers: int = 0,  # processes; 0 means one per core
    json: bool = False,  # print the numbers as JSON
):
    """Say what filelists hold: rows, image sizes, caption lengths, reasons of bad rows, cached latents."""
    shaping = _open_shaping(buckets, settings, sheet, chart)
    if out:
        check_output(out)
    rule = CaptionRule.of_flags(captions, clean_captions)
    meter = _open_meter(tokenizer, max_length) if tokenizer else None
    parts = list_parts(filelists, layout, must_exist=False, latents_dir=latents_dir)
    num_workers = check_workers(num_workers)
    indexed = index_parts(parts, num_workers)
    counts, skipped, not_rows = {measure: Counter() for measure in _MEASURES}, Counter(), Counter()
    coverage = Coverage()
    for _, (own_counts, own_skipped, own_not_rows, own_coverage) in over_rows(
        partial(measure_span, rule=rule, meter=meter), indexed, num_workers, "stats"
    ):
        skipped.update(own_skipped)
        not_rows.update(own_not_rows)
        coverage += own_coverage
        for measure, values in own_counts.items():
            counts[measure].update(values)
    if meter:
        counts["caption_tokens"] = coverage.lengths
    report = {
        "parts": len(parts),
        "rows": indexed.num_rows,
        "skipped": dict(skipped.most_common()),
        "not_rows": dict(not_rows),
        "bad_parts": indexed.bad_parts(),
        "quantiles": list(_QUANTILES),
        **{measure: quantiles(values) for measure, values in counts.items()},
        **survey(indexed.rows, num_workers, check_bytes=False),
    }
    if meter:
        report["unknown_share"], report["cut_share"] = coverage.unknown_share, coverage.cut_share(max_length)
        report["tokenizer"] = f"of all captions, {coverage.describe(max_length)}"
    if shaping:
        report["buckets"] = shaping(indexed)
    if out:
        draw_histograms(out, counts, skipped, f"{report['rows']} rows in {len(parts)} part(s)")
    print_report(report, describe, json)


def _open_meter(tokenizer: str, max_length: int) -> CoverageMeter:
    from ..data.text.tokenizer import load_tokenizer

    return CoverageMeter(load_tokenizer(tokenizer, max_length))


def _open_shaping(buckets: str, words: list[str], sheet: str, chart: str) -> Callable[[Indexed], dict] | None:
    """What reports on the shapes of indexed parts, and draws them; None where nothing is asked for. Raises ConfigError,
    OutputError."""
    if not buckets:
        if words or sheet or chart:
            raise ConfigError("--settings, --sheet and --chart say nothing without --buckets; add --buckets ratios")
        return None
    from .buckets import read_settings, report_shapes

    settings = read_settings(buckets, words)
    for path in filter(None, (sheet, chart)):
        check_output(path)
    return partial(report_shapes, settings=settings, sheet=sheet, chart=chart)


def measure_span(
    span: Span, rule: CaptionRule, meter: CoverageMeter | None = None
) -> tuple[dict, Counter, Counter, Coverage]:
    """(how often each value of each measure comes, bad rows by reason, what is not a row by reason, coverage by the
    tokenizer of `meter`) over a span. rule: says which captions of a row are measured: all that it may draw."""
    counts, skipped, captions = {measure: Counter() for measure in _MEASURES}, Counter(), []
    with closing(open_rows(span.part)) as part:
        for number in range(span.start, span.stop):
            try:
                row = part.read(number)
                rule.check(row)
            except RowError as error:
                skipped[error.reason] += 1
                continue
            width, height = int(part.widths[number]), int(part.heights[number])
            if width and height:
                values = [width, height, min(width, height), round(width / height, 2)]
                values += [math.ceil(len(row.image) / 1000)] * part.has_images
                for measure, value in zip(_MEASURES, values, strict=False):
                    counts[measure][value] += 1
            elif part.has_images:
                skipped["image"] += 1
                continue
            for caption in rule.texts(row):
                counts["caption_words"][len(caption.split())] += 1
                counts["caption_chars"][len(caption)] += 1
                captions.append(caption)
        not_rows = count_not_rows(part, span)
    return counts, skipped, not_rows, meter.measure(captions) if meter else Coverage()


def quantiles(values: Counter) -> list[float]:
    """The values at _QUANTILES of all that were counted; empty where nothing was."""
    if not values:
        return []
    ordered = sorted(values)
    ends = np.cumsum([values[value] for value in ordered])
    ranks = [round(share * (int(ends[-1]) - 1)) for share in _QUANTILES]
    return [ordered[int(np.searchsorted(ends, rank, side="right"))] for rank in ranks]


def describe(report: dict) -> str:
    """A report as a table."""
    lines = [f"{report['rows']} rows in {report['parts']} part(s)"]
    heads = [{0: "min", 0.5: "median", 1: "max"}.get(share, f"{share:.0%}") for share in report["quantiles"]]
    lines.append(f"{'':<22}" + "".join(f"{head:>9}" for head in heads))
    for measure, title in (_MEASURES | _TOKENS).items():
        if report.get(measure):
            lines.append(f"{title:<22}" + "".join(f"{value:>9g}" for value in report[measure]))
    if "tokenizer" in report:
        lines.append(report["tokenizer"])
    lines += [f"  bad rows, {reason}: {count}" for reason, count in report["skipped"].items()]
    if "buckets" in report:
        lines += describe_shapes(report["buckets"])
        lines += [f"  not used, {reason}: {count:,}" for reason, count in report["buckets"]["skipped"].items()]
    lines += describe_not_rows(report["not_rows"]) + describe_survey(report)
    return "\n".join(lines + describe_bad_parts(report["bad_parts"]))


def draw_histograms(path, counts: dict[str, Counter], skipped: Counter, title: str) -> None:
    """One histogram for each measure, and bad rows by reason, into a PNG."""
    from matplotlib.figure import Figure

    shown = [measure for measure in _MEASURES | _TOKENS if measure in counts]
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 5 if len(shown) > len(_MEASURES) else 4).ravel()
    for axis, measure in zip(axes, shown, strict=False):
        axis.set_title((_MEASURES | _TOKENS)[measure])
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
    axis.hist(list(values), bins=_bins(values), weights=list(values.values()), color="#4477aa")
    if all(isinstance(value, int) for value in values):
        axis.xaxis.get_major_locator().set_params(integer=True)


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


def _bins(values: Counter) -> np.ndarray | int:
    """About 40 bins; of whole numbers each bin takes as many, or the picture would show teeth that are not there."""
    low, high = min(values), max(values)
    if not all(isinstance(value, int) for value in values):
        return 40
    step = max(1, math.ceil((high - low + 1) / 40))
    return np.arange(low, high + step + 1, step) - 0.5
