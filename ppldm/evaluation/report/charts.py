"""Charts of runs, drawn by matplotlib; text in the SVG stays text."""

from collections import defaultdict

import numpy as np

from ...training.monitor.metrics import NUM_QUARTERS, scale_losses, thin
from ...utils.web.page import COLOURS, new_figure
from .read_run import Run
from .sweep import SCALE, Curve

_X = "updates"
_POINTS = 400  # of a curve, at most: more are averaged


def draw_losses(runs: list[Run]):
    """Losses of all runs, and of their held-out rows."""
    figure, axes = new_figure("loss", _X)
    for run, colour in _coloured(runs):
        axes.plot(*_thinned(run.records, "loss"), **_line(run.records, "loss"), color=colour, label=run.name)
        if steps_and_values := _points(run.records, "validation_loss"):
            axes.plot(*steps_and_values, "o--", color=colour, markersize=3, linewidth=1, label=f"{run.name}, held out")
    return _finish(figure, axes, losses=True)


def draw_quarters(run: Run):
    """Losses of one run by noise level; None where it has no levels."""
    figure, axes = new_figure("loss by noise level", _X)
    for number in range(1, NUM_QUARTERS + 1):
        words = {1: " (least noise)", NUM_QUARTERS: " (most)"}.get(number, "")
        if steps_and_values := _thinned(run.records, f"loss_quarter_{number}"):
            style = _line(run.records, f"loss_quarter_{number}")
            axes.plot(*steps_and_values, **style, color=COLOURS[number - 1], label=f"quarter {number}{words}")
    return _finish(figure, axes, losses=True) if axes.lines else None


def draw_metrics(runs: list[Run]) -> list:
    """A chart for each metric of the runs' evaluations, with intervals; and the PSNR that autoencoders log."""
    names = {name: None for run in runs for record in run.evaluations for name in record if f"{name}_low" in record}
    figures = []
    for name in names:
        figure, axes = new_figure(name, _X)
        for run, colour in _coloured(runs):
            by_scale = defaultdict(list)
            for record in run.evaluations:
                if record.get(name) is not None:
                    by_scale[record.get(SCALE)].append(record)
            for number, (scale, records) in enumerate(by_scale.items()):
                label = f"{run.name}, guidance {scale:g}" if scale is not None else run.name
                style = ("o-", "s--", "^:", "v-.")[number % 4]
                _with_bars(axes, records, name, style, colour, label)
        figures.append(_finish(figure, axes))
    if any("psnr" in record for run in runs for record in run.records):  # of an autoencoder's samples
        figure, axes = new_figure("PSNR of samples, dB", _X)
        for run, colour in _coloured(runs):
            axes.plot(*_thinned(run.records, "psnr"), **_line(run.records, "psnr"), color=colour, label=run.name)
        figures.append(_finish(figure, axes))
    return figures


def draw_sweep(curves: list[Curve]):
    """A distance against the CLIP score, a point per guidance scale."""
    figure, axes = new_figure(curves[0].y, curves[0].x.replace("_", " "))
    figure.set_size_inches(7, 4.5)
    for curve, colour in _coloured(curves):
        scales, xs, ys = (np.array(one) for one in zip(*curve.points, strict=True))
        bars = {"xerr": _bars(xs)} if curve.x != SCALE else {}
        axes.errorbar(
            *(xs[:, 0], ys[:, 0]), yerr=_bars(ys), **bars, fmt="o-", color=colour, label=curve.name,
            markersize=4, linewidth=1.2, elinewidth=0.7, capsize=2,
        )  # fmt: skip
        for number, (scale, x, y) in enumerate(zip(scales, xs[:, 0], ys[:, 0], strict=True)):
            beside = (5, 8) if number % 2 else (5, -14)  # neighbours may be close
            axes.annotate(f"{scale:g}", (x, y), beside, textcoords="offset points", fontsize=8, color=colour)
    return _finish(figure, axes)


def _finish(figure, axes, losses: bool = False):
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, framealpha=0.7)
    if losses and axes.lines:
        values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
        scale_losses(axes, values[np.isfinite(values)])
    return figure


def _coloured(things: list):
    return [(thing, COLOURS[number % len(COLOURS)]) for number, thing in enumerate(things)]


def _points(records: list[dict], name: str) -> tuple[list, list] | tuple:
    found = [(record["global_step"], record[name]) for record in records if record.get(name) is not None]
    return tuple(zip(*found, strict=True))


def _thinned(records: list[dict], name: str) -> tuple[np.ndarray, np.ndarray] | tuple:
    """Steps and values, of many the means of groups."""
    if not (found := _points(records, name)):
        return ()
    return thin(*np.array(found, dtype=float), _POINTS)[:2]  # type: ignore[call-arg]


def _line(records: list[dict], name: str) -> dict:
    """A line of one point is not seen."""
    alone = sum(record.get(name) is not None for record in records) == 1
    return {"linewidth": 1.2, **({"marker": "o", "markersize": 4} if alone else {})}


def _with_bars(axes, records: list[dict], name: str, style: str, colour: str, label: str) -> None:
    steps = [record["global_step"] for record in records]
    ends = np.array([[record[name + end] for end in ("", "_low", "_high")] for record in records])
    axes.plot(steps, ends[:, 0], style, color=colour, label=label, markersize=4, linewidth=1.2)
    if len(steps) > 1:
        axes.fill_between(steps, ends[:, 1], ends[:, 2], color=colour, alpha=0.15, linewidth=0)
    else:
        axes.errorbar(steps, ends[:, 0], yerr=_bars(ends), fmt="none", ecolor=colour, capsize=3)


def _bars(ends: np.ndarray) -> np.ndarray:
    return np.abs(ends[:, 1:] - ends[:, :1]).T
