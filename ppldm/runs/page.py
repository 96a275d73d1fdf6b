"""What is shown of runs: on the page that follows them (`watch`), and in the file that `ppldm report` writes of them.

Both are page.html, which loads nothing. It asks for `now` and `charts`; the file holds them, and what else is to be
said of runs that are looked back on.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image

from ..data.shapes import BUCKETS_FILE
from ..training.checkpoint import read_manifest
from ..training.metrics import EVALUATION_FILE, METRICS_FILE, read_metrics, skipped_rows
from ..training.run_folder import CONTROL_DIR, PROMPTS_FILE, Order
from ..utils.errors import ConfigError, DataError, OutputError
from ..utils.files import atomic_write, local_path
from ..utils.log import get_logger
from ..utils.text import NOT_UTF8, escape
from ..utils.web.page import COLOURS, data_url, new_figure, render, save_figure, url_of
from ..weights.folders import list_checkpoints, one_run, runs_in, step_of
from .read import RunFolder, flatten

_Runs = Annotated[list[str], {"opt": False, "nargs": "*", "type": str, "metavar": "RUN"}]
_Results = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "RESULT"}]
PAGE = Path(__file__).with_name("page.html")
MOST_POINTS = 600  # of a curve, at most: of more, groups are shown by their mean, least and most
MOST_STEPS = 8  # pictures of a strip
_MOST_WIDTH = 900
_PLAIN_BYTES = 100_000  # of a picture that is shown as it is

_QUARTERS = {"loss_quarter_1": "quarter 1 (least noise)", "loss_quarter_2": "quarter 2",
             "loss_quarter_3": "quarter 3", "loss_quarter_4": "quarter 4 (most)"}  # fmt: skip
# Charts in their order: title -> names of numbers. Each other number has a chart of its own behind them.
CHARTS = {
    "loss": ("loss", "validation_loss"),
    "loss by noise level": tuple(_QUARTERS),
    "images a second": ("images_per_second",),
    "share of time waiting for data": ("data_wait_share",),
    "gradient norm": ("grad_norm",),
    "learning rate": ("lr_abs",),
    "skipped so far": ("skipped_rows", "skipped_updates"),
    "memory, GB": ("peak_memory_gb", "peak_device_memory_gb"),
    "PSNR of samples, dB": ("psnr",),
}
SMOOTHED = ("loss", "loss by noise level")  # as losses alone are noise about a curve
LOOK = {"colours": COLOURS, "smoothed": SMOOTHED}
_HIDDEN = {"global_step", "time", "data_crc32", "avg_reader_cost", "avg_batch_cost", "ips",
           "images_per_second_per_device"}  # fmt: skip
# What may stand on the vertical axis: the first of which all results have a value; `name:features` counts too.
DISTANCES = ("fid", "clip_fid", "cmmd", "kid", "frechet")
SCALE, SCORE = "guidance_scale", "clip_score"


@dataclass(frozen=True)
class Curve:
    """One model's points. x, y: names of metrics, x also `guidance_scale`. points: (scale, x, y), value, low, high."""

    name: str
    x: str
    y: str
    points: list[tuple[float, tuple[float, float, float], tuple[float, float, float]]]


def report(
    runs: _Runs = (),  # folders of runs, or folders that hold runs; several are shown side by side
    sweep: _Results = (),  # results of `ppldm evaluate` at several guidance scales, or folders that hold them
    out: str = None,  # file to write, default: report.html in the first RUN; a .png holds only the sweep's curve
):
    """Write curves, pictures, data, recipe, time and cost of runs into one HTML file."""
    target = local_path(out) if out else local_path((*runs, ".")[0]) / "report.html"
    picture = target.suffix.lower() == ".png"
    if not runs and not sweep:
        raise ConfigError("nothing to report; name the folder of a run, or results with --sweep")
    if picture and (runs or not sweep):
        raise ConfigError(f"--out {target} can hold only the curve of --sweep; name a .html for runs")
    found, curves = _read(runs), read_sweep([local_path(one) for one in sweep])
    try:
        with atomic_write(target) as file:
            if picture:
                save_figure(draw_sweep(curves), file, "png")
            else:
                file.write(make_file(found, curves).encode(errors=NOT_UTF8))
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}; give another --out") from error
    get_logger().info("report: %s", target)


def charts(run: RunFolder, share: float = 1.0) -> dict[str, list[dict]]:
    """Title -> lines: {"name", "points": steps, means, leasts, mosts, "last"}. share: of the run, its newest part."""
    first = run.step * (1 - share)
    known = {name: title for title, names in CHARTS.items() for name in names}
    labels = {"validation_loss": "held out", **_QUARTERS}
    found: dict[str, list] = {title: [] for title in CHARTS}
    for name in sorted(run.series.keys() - _HIDDEN, key=lambda name: [*known, name].index(name)):
        steps, values = (np.array(one) for one in run.series[name])
        keep = np.isfinite(values) & (steps >= first)
        if keep.any() and not name.startswith("skipped_rows_"):
            title = known.get(name, "learning rate" if name.startswith("lr_abs") else name)
            thinned = thin(steps[keep], values[keep], MOST_POINTS)
            points = [[float(f"{number:.6g}") for number in one] for one in thinned]  # enough digits for a curve
            line = {"name": labels.get(name, name), "points": points, "last": values[keep][-1]}
            found.setdefault(title, []).append(line)
    for (name, label), points in _evaluated(run, first).items():
        line = {"name": label, "points": list(zip(*points, strict=True)), "last": points[-1][1]}
        found.setdefault(name, []).append(line)
    return {title: lines for title, lines in found.items() if lines}


def _evaluated(run: RunFolder, first: float) -> dict[tuple[str, str], list]:
    """(metric, label) -> step, value, low and high of each evaluation from update `first` on."""
    found = defaultdict(list)
    for record in run.evaluations():
        scale = record.get(SCALE)
        for name in record:
            ends = [record.get(name + end) for end in ("", "_low", "_high")]
            if record["global_step"] >= first and None not in ends:
                label = name if scale is None else f"{name} at guidance {scale:g}"
                found[name, label].append([record["global_step"], *ends])
    return found


def thin(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, ...]:
    """(steps, means, leasts, mosts) of at most so many groups of neighbours, as equal as they can be; float64."""
    starts = np.unique(np.linspace(0, len(steps), min(most, len(steps)), endpoint=False).astype(np.int64))
    counts = np.diff(starts, append=len(steps))
    means = [np.add.reduceat(one, starts) / counts for one in (steps, values)]
    return *means, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def now(run: RunFolder) -> dict:
    """What changes from moment to moment, and what is asked of the run, JSON-ready."""
    status, state, config = run.status(), run.state(), run.config(optional=True)
    control, validation = run.folder / CONTROL_DIR, config.get("validation")
    own = validation.get("validation_prompts") if isinstance(validation, dict) else None
    prompts = control / PROMPTS_FILE
    return {
        "name": run.name,
        "folder": str(run.folder),
        "named": run.is_named,
        "state": state,
        "family": str(config.get("family", "")),
        "step": run.step,
        "max_steps": status.get("max_steps"),
        "seconds_left": run.seconds_left() if state == "training" else None,
        "last": {name: value for name, value in run.last.items() if not name.startswith("skipped_rows_")},
        "skipped": skipped_rows(run.last),
        "damaged": run.damaged,
        "machine": {name: status[name] for name in ("host", "device", "ranks") if status.get(name) is not None},
        "takes_orders": control.is_dir() and state in ("training", "unknown"),
        "orders": [order.file for order in Order if (control / order.file).exists()],
        "prompts": prompts.read_text(encoding="utf-8", errors="replace") if prompts.is_file() else "",
        "own_prompts": [str(one) for one in own] if isinstance(own, list) else [],
    }


def _read(places) -> list:
    """All runs of these folders but those below one that have no line yet. Raises ConfigError, DataError."""
    found, problems = [], []
    for run in dict.fromkeys(run for place in places for run in runs_in(place)):
        try:
            found.append(read_whole(run))
        except DataError as error:
            if run in map(local_path, places):
                raise
            problems.append((run, error))
    if problems and not found:
        raise problems[0][1]
    for run, error in problems:
        get_logger().warning("passing over %s: %s", run, error)
    return found


def read_whole(folder: Path) -> RunFolder:
    """A run that is looked back on. Raises DataError for a folder without metrics, or with damaged files."""
    run = RunFolder(folder)
    if not run.records:
        raise DataError(f"{folder / METRICS_FILE} is empty; wait for the run's first line, every --logging_steps")
    if (folder / EVALUATION_FILE).is_file():
        read_metrics(folder / EVALUATION_FILE)
    run.config()
    run.look()
    return run


def facts(run: RunFolder) -> dict[str, str]:
    """What is said of a whole run, beside what `now` says: words by title."""
    newest, data = list_checkpoints(run.folder)[:1], run.config().get("data", {})
    manifest = read_manifest(newest[0]) if newest else {}
    identity = manifest.get("identity", {})
    hours, devices = training_hours(run.records)
    machine, versions = (
        ", ".join(f"{name} {value}" for name, value in (manifest.get(what) or {}).items() if value is not None)
        for what in ("machine", "versions")
    )
    batch = identity.get("global_batch_size")
    step = max([run.step, *map(step_of, newest)])  # a run that was stopped saves after its last line
    samples = step * batch if batch else None
    known = {
        "Updates": f"{step:,}",
        "Trained on": ", ".join(str(data[name]) for name in ("file_list", "where") if data.get(name)),
        "Rows": f"{identity['rows']:,}" if "rows" in identity else "",
        "Samples": samples and f"{samples:,} in batches of {batch:,}",
        "Epochs": samples and identity.get("rows") and f"{samples / identity['rows']:.4g}",
        "Shapes": ", ".join(identity.get("buckets") or ()),
        "Precision": identity.get("precision", ""),
        "Machine": machine,
        "Versions": versions,
        "Time in updates": f"{hours:.3g} hours" if hours >= 0.1 else f"{60 * hours:.2g} minutes",
        "Cost": f"{hours * devices:.3g} device hours ({devices} device{'s' * (devices != 1)})",
        "Data": identity.get("data", ""),
    }
    return {title: words for title, words in known.items() if words}


def training_hours(records: list[dict]) -> tuple[float, int]:
    """(hours in updates, devices) by the speed that each line tells; pauses between starts are not counted."""
    seconds, before, devices = 0.0, 0, 1
    for record in records:
        if not (rate := record.get("images_per_second")):
            continue
        seconds += (record["global_step"] - before) * record["avg_batch_cost"]
        before, devices = record["global_step"], max(1, round(rate / record["images_per_second_per_device"]))
    return seconds / 3600, devices


def of_one_kind(runs: list[RunFolder]) -> list[list[RunFolder]]:
    """Runs whose settings can be compared: those of autoencoders apart from those of models that draw."""
    kinds: dict[bool, list[RunFolder]] = {}
    for run in runs:
        kinds.setdefault(run.config().get("family") == "autoencoder", []).append(run)
    return list(kinds.values())


def differing(configs: list[dict]) -> list[tuple[str, list]]:
    """(setting, its value in each config) of all settings that are not the same in all; None where one sets nothing,
    which is the same whether or not its family has the setting."""
    settings = [flatten(config) for config in configs]
    found = [(name, [one.get(name) for one in settings]) for name in {name: None for one in settings for name in one}]
    return [(name, values) for name, values in found if any(value != values[0] for value in values)]


def strips(run: RunFolder) -> dict[str, list[dict]]:
    """Tag -> {"step", "url", "prompts"} of at most eight pictures, evenly over the training, the first and the last
    among them; and the chart of its rows by shape, where there is one."""
    found = {}
    for tag, files in run.pictures().items():
        files = [one for one in files if one["step"] <= run.step]
        chosen = np.linspace(0, len(files) - 1, min(len(files), MOST_STEPS)).round().astype(int)
        kept = [(files[number]["step"], run.picture(files[number]["file"])) for number in chosen]
        if kept:
            found[tag] = [{"step": step, "url": picture_url(path), "prompts": []} for step, path in kept]
    if (buckets := run.folder / BUCKETS_FILE).is_file():
        found["rows by shape"] = [{"step": 0, "url": picture_url(buckets), "prompts": []}]
    return found


def picture_url(path: Path) -> str:
    """A PNG as it is, a large one smaller and as JPEG."""
    content = path.read_bytes()
    if len(content) <= _PLAIN_BYTES:
        return url_of(content, "png")
    with Image.open(path) as picture:
        return data_url(picture, (_MOST_WIDTH, 8 * _MOST_WIDTH))


def make_file(runs: list[RunFolder], curves: list[Curve]) -> str:
    """The page of runs and of a sweep, as one file."""
    # Where the run lies, and what is asked of it, does not go into a file that is passed on.
    own = {"named": True, "folder": "", "machine": {}, "prompts": "", "own_prompts": [], "orders": []}
    held = {
        "now": {"runs": [now(run) | own | {"facts": facts(run)} for run in runs], "control": False},
        "curves": [{"charts": charts(run), "pictures": strips(run)} for run in runs],
        **{f"recipe/{number}": {"recipe": run.recipe()} for number, run in enumerate(runs)},
    }
    compared = [group for group in of_one_kind(runs) if len(group) > 1]
    return render(
        PAGE.read_text(encoding="utf-8"),
        **LOOK,
        nonce=sha256(json.dumps(held).encode()).hexdigest(),  # which no word inside the page can know
        title=", ".join(run.name for run in runs) or "guidance sweep",
        held=held,
        sweep=draw_sweep(curves) if curves else None,
        curves=curves,
        compared=[(group, differing([run.config() for run in group])) for group in compared],
    )


def read_sweep(paths: list[Path]) -> list[Curve]:
    """A curve for each model among the results, which are files or in folders. Raises DataError."""
    from ..evaluation.measure import read_result

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
