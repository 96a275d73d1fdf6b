"""Charts as pictures, drawn by matplotlib: a run's losses, and the trade-off of guidance, results of `ppldm evaluate`
with a point per guidance scale."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..training.monitor.metrics import METRICS_FILE, read_metrics
from ..utils.errors import DataError, OutputError
from ..utils.files import atomic_write, local_path
from ..utils.log import get_logger
from ..utils.text import escape
from ..weights.runs import one_run

# What may stand on the vertical axis: the first of which all results have a value; `name:features` counts too.
DISTANCES = ("fid", "clip_fid", "cmmd", "kid", "frechet")
SCALE, SCORE = "guidance_scale", "clip_score"


@dataclass(frozen=True)
class Curve:
    """One model's points. x and y: names of metrics; x may be `guidance_scale`. points: (scale, x, y), each of the last
    two as value, low, high."""

    name: str
    x: str
    y: str
    points: list[tuple[float, tuple[float, float, float], tuple[float, float, float]]]


def read_sweep(paths: list[Path]) -> list[Curve]:
    """A curve for each model among the results, which are files or in folders. Raises DataError."""
    from ..evaluation.result import read_result

    files = [one for path in paths for one in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if paths and not files:
        raise DataError(f"{paths[0]} holds no results; name what `ppldm evaluate` wrote")
    found: dict[str, list] = {}
    for file in files:
        result = read_result(file)
        scale = result.settings.get("drawn", {}).get(SCALE)
        if scale is None:
            raise DataError(f"{file} has no guidance scale: its pictures were not drawn; omit it from --sweep")
        found.setdefault(str(result.of["name"]), []).append((float(scale), result))
    shared = set.intersection(*(set(one.metrics) for own in found.values() for _, one in own)) if found else set()
    names = [name for known in DISTANCES for name in sorted(shared) if name.partition(":")[0] == known]
    if found and not names:
        raise DataError(
            f"the results of --sweep share none of {', '.join(DISTANCES)}; evaluate with the same --metrics"
        )
    x = next((name for name in sorted(shared) if name.partition(":")[0] == SCORE), SCALE)
    return [Curve(escape(name), x, names[0], _points(own, x, names[0])) for name, own in found.items()]


def _points(results: list[tuple], x: str, y: str) -> list:
    def ends(result, scale: float, name: str):
        measured = result.metrics.get(name)
        return tuple(measured[what] for what in ("value", "low", "high")) if measured else (scale,) * 3

    ordered = sorted(results, key=lambda pair: pair[0])
    return [(scale, ends(result, scale, x), ends(result, scale, y)) for scale, result in ordered]


def draw_sweep(curves: list[Curve]):
    """A distance against the CLIP score, a point per guidance scale."""
    from ..utils.web.page import COLOURS, new_figure

    figure, axes = new_figure(curves[0].y, curves[0].x.replace("_", " "))
    figure.set_size_inches(7, 4.5)
    for place, curve in enumerate(curves):
        colour = COLOURS[place % len(COLOURS)]
        scales, xs, ys = (np.array(one) for one in zip(*curve.points, strict=True))
        bars = {"xerr": _bars(xs)} if curve.x != SCALE else {}
        axes.errorbar(
            xs[:, 0], ys[:, 0], yerr=_bars(ys), **bars, fmt="o-", color=colour, label=curve.name,
            markersize=4, linewidth=1.2, elinewidth=0.7, capsize=2,
        )  # fmt: skip
        for number, (scale, x, y) in enumerate(zip(scales, xs[:, 0], ys[:, 0], strict=True)):
            beside = (5, 8) if number % 2 else (5, -14)  # neighbours may be close
            axes.annotate(f"{scale:g}", (x, y), beside, textcoords="offset points", fontsize=8, color=colour)
    axes.legend(fontsize=7, framealpha=0.7)
    return figure


def _bars(ends: np.ndarray) -> np.ndarray:
    return np.abs(ends[:, 1:] - ends[:, :1]).T


def plot_loss(
    metrics: str,  # a metrics.jsonl, or the folder of a run, or one that holds a run
    out: str = None,  # PNG to write; by default loss.png beside the metrics
):
    """Draw a run's loss curve as PNG."""
    from matplotlib.figure import Figure

    source = local_path(metrics)
    source = one_run(source) / METRICS_FILE if source.is_dir() else source
    target = local_path(out) if out else source.parent / "loss.png"
    records = [r for r in read_metrics(source) if r.get("loss") is not None]
    if not records:
        raise DataError(f"{source} has no losses; train first")
    figure = Figure(figsize=(7, 4), layout="constrained")
    draw_loss(figure.subplots(), records, source.resolve().parent.name)
    try:
        with atomic_write(target) as file:
            figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}; give another --out") from error
    get_logger().info("loss curve: %s", target)


def draw_loss(axes, records: list[dict], run_name: str) -> None:
    """The losses of `records` against their steps, their running mean, and the losses of held-out rows; on a
    logarithmic axis, with numbers that people read, where losses fall by a factor of 3 and more."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    steps, losses = [r["global_step"] for r in records], np.array([r["loss"] for r in records])
    window = max(1, len(losses) // 25)
    alone = {"marker": "o", "markersize": 4} if len(losses) == 1 else {}  # a line of one point is not seen
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="logged", **alone)
    if window > 1:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, color="#08519c", label=f"mean of {window}")
    held_out = [(r["global_step"], r["validation_loss"]) for r in records if r.get("validation_loss") is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#e6550d", markersize=3, label="held-out rows")
    if window > 1 or held_out:
        axes.legend()
    axes.set(xlabel="global step (optimizer updates)", ylabel="training loss")
    what = f"mean loss {losses[-window:].mean():.4g}" if window > 1 else f"loss {losses[-1]:.4g}"
    axes.set_title(f"{escape(run_name)}: {what} at step {steps[-1]:,}")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(True, which="both", alpha=0.3)
    if losses.min() > 0 and losses.max() > 3 * losses.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
