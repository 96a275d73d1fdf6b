"""What a run's folder says of it. Whatever is not there yet is left out; nothing in it is changed."""

from dataclasses import dataclass, field
from pathlib import Path

from ...config.write import RECIPE_FILE
from ...data.shape_chart import BUCKETS_FILE
from ...training.monitor.metrics import EVALUATION_FILE, METRICS_FILE, read_metrics, skipped_rows
from ...training.monitor.sinks import old_pictures
from ...utils.errors import DataError
from ...utils.files import read_json
from ...utils.machine.cpu import load_paddle
from ...utils.text import escape
from ...weights.checkpoint_names import list_checkpoints, step_of
from ...weights.runs import RUN_FILE


@dataclass(frozen=True)
class Run:
    """A run. records: of metrics.jsonl; evaluations: of evaluation.jsonl. samples: (step, file) by tag, in order of
    their steps. facts: words by title. settings: value by `section.name`."""

    name: str
    records: list[dict]
    evaluations: list[dict] = field(default_factory=list)
    samples: dict[str, list[tuple[int, Path]]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    recipe: str = ""
    buckets: Path | None = None


def read_run(folder: Path) -> Run:
    """Raises DataError for a folder without metrics, or with damaged ones."""
    records = read_metrics(folder / METRICS_FILE)
    if not records:
        raise DataError(f"{folder / METRICS_FILE} is empty; wait for the run's first line, every --logging_steps")
    evaluations, recipe, buckets = folder / EVALUATION_FILE, folder / RECIPE_FILE, folder / BUCKETS_FILE
    samples: dict[str, list] = {}
    for step, tag, path in old_pictures(folder, records[-1]["global_step"], most=None):
        samples.setdefault(tag, []).append((step, path))
    config, newest = _read_config(folder), list_checkpoints(folder)[:1]
    manifest, step = _newest_manifest(newest), max(map(step_of, newest), default=0)
    return Run(
        name=escape(folder.resolve().name),
        records=records,
        evaluations=read_metrics(evaluations) if evaluations.is_file() else [],
        samples=samples,
        facts={name: words for name, words in _facts(records, config, manifest, step).items() if words},
        settings=dict(_flatten(config)),
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else "",
        buckets=buckets if buckets.is_file() else None,
    )


def _read_config(folder: Path) -> dict:
    config = read_json(folder / RUN_FILE)
    return config if isinstance(config, dict) else {}


def _newest_manifest(newest: list[Path]) -> dict:
    load_paddle()
    from ...training.checkpoint.checkpoint import read_manifest

    return read_manifest(newest[0]) if newest else {}


def _facts(records: list[dict], config: dict, manifest: dict, saved: int) -> dict[str, str]:
    """saved: updates of the newest checkpoint, which a run that was stopped wrote after its last line."""
    last = next((record for record in reversed(records) if "loss" in record), records[-1])
    identity, data = manifest.get("identity", {}), config.get("data", {})
    hours, devices = training_hours(records)
    machine = manifest.get("machine") or {}
    machine = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    versions = ", ".join(f"{name} {value}" for name, value in manifest.get("versions", {}).items())
    batch = identity.get("global_batch_size")
    step = max(last["global_step"], saved)
    samples = step * batch if batch else None
    reasons = skipped_rows(last)
    skipped = f"{int(last.get('skipped_rows', 0)):,} rows, {int(last.get('skipped_updates', 0)):,} updates"
    return {
        "Family": config.get("family", ""),
        "Updates": f"{step:,}",
        "Trained on": ", ".join(str(data[name]) for name in ("file_list", "where") if data.get(name)),
        "Rows": f"{identity['rows']:,}" if "rows" in identity else "",
        "Samples": samples and f"{samples:,} in batches of {batch:,}",
        "Epochs": samples and identity.get("rows") and f"{samples / identity['rows']:.4g}",
        "Skipped": skipped
        + (f" ({', '.join(f'{name} {count:,}' for name, count in reasons.items())})" if reasons else ""),
        "Shapes": ", ".join(identity.get("buckets") or ()),
        "Precision": identity.get("precision", ""),
        "Machine": machine,
        "Versions": versions,
        "Time in updates": f"{hours:.3g} hours",
        "Cost": f"{hours * devices:.3g} device hours ({devices} device{'s' * (devices != 1)})",
        "Speed": f"{last['images_per_second']:.4g} images/s" if last.get("images_per_second") else "",
        "Memory": f"{last['peak_memory_gb']:.3g} GB" if last.get("peak_memory_gb") else "",
        "Data": identity.get("data", ""),
    }


def training_hours(records: list[dict]) -> tuple[float, int]:
    """(hours in updates, devices) by the speed that each line tells; pauses between starts are not counted."""
    seconds, before, devices = 0.0, 0, 1
    for record in records:
        if not (rate := record.get("images_per_second")):
            continue
        seconds += (record["global_step"] - before) * record["avg_batch_cost"]
        before, devices = record["global_step"], max(1, round(rate / record["images_per_second_per_device"]))
    return seconds / 3600, devices


def _flatten(tree: dict, prefix: str = ""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
