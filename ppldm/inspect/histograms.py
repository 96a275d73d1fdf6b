"""Quantiles and histograms of counted values, for tables, pictures and pages."""

import math
from collections import Counter

import numpy as np

from ..utils.files import atomic_write

QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)


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
