"""What is shown of runs: on the page that follows them (`watch`), and in the file that is kept of them (`report`).

Both are page.html. It asks for `now` and `charts`; the file holds them, and what else is to be said of runs that are
looked back on. It loads nothing.
"""

import json
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

import numpy as np
from PIL import Image

from ..data.shape_chart import BUCKETS_FILE
from ..training.monitor.control import CONTROL_DIR, PROMPTS_FILE, Order
from ..training.monitor.metrics import EVALUATION_FILE, METRICS_FILE, read_metrics, skipped_rows
from ..utils.errors import DataError
from ..utils.machine.cpu import load_paddle
from ..utils.web.page import COLOURS, data_url, render, url_of
from ..weights.folders import list_checkpoints, step_of
from .plots import SCALE, Curve, draw_sweep
from .read import RunFolder, flatten

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


def charts(run: RunFolder, share: float = 1.0) -> dict[str, list[dict]]:
    """Title -> lines: {"name", "points": steps, means, leasts, mosts, "last": the newest number}. share: of the run,
    its newest part."""
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
    control = run.folder / CONTROL_DIR
    validation = config.get("validation")
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
    load_paddle()
    from ..training.checkpoint.checkpoint import read_manifest

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
