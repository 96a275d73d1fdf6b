"""The way of rows from metadata to training steps: the records of preparation, what stats has read, a run's skips.

In each stage, rows in = rows out + rows dropped, by reason; of a run the rows are those that it drew, epoch after
epoch, and rows out its samples.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...prepare.provenance.accounts import read_stages
from ...training.monitor.metrics import METRICS_FILE, read_metrics, skipped_rows
from ...utils.errors import ConfigError
from ...utils.files import local_path

READ = "read"


@dataclass(frozen=True)
class Step:
    """One stage of the way. dropped: rows by reason, the most frequent first. place: the folder of its records."""

    name: str
    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    place: str = ""


def find_way(parts: Iterable[Path], records: Iterable[str], rows: int, skipped: dict[str, int]) -> list[Step]:
    """The stages that parts went through, the first one first, as far as records of them are found: beside the parts
    and in the folders `records`, runs' folders among them. rows, skipped: what was read of the parts, and what of it
    is bad, by reason. Raises ConfigError for a folder without records, DataError."""
    named = [local_path(one) for one in records]
    runs = [folder for folder in named if (folder / METRICS_FILE).is_file()]
    for folder in named:
        if folder not in runs and not read_stages([folder]):
            raise ConfigError(
                f"--records {folder} holds no records; name the folder that filter, download, convert, pipeline or "
                "train has written"
            )
    beside = (folder for path in parts for folder in (path.parent.parent, path.parent))
    way = [
        Step(name, result.rows_in, result.rows_out, _sorted(result.dropped), str(folder))
        for name, folder, result in read_stages([*named, *dict.fromkeys(beside)])
    ]
    way.append(Step(READ, rows, rows - sum(skipped.values()), _sorted(skipped)))
    return way + [step for run in runs if (step := _read_run(run))]


def _read_run(folder: Path) -> Step | None:
    """What a run drew; None before its first line that says its speed."""
    records = [one for one in read_metrics(folder / METRICS_FILE) if one.get("images_per_second")]
    if not records:
        return None
    last = records[-1]
    samples = last["global_step"] * round(last["images_per_second"] * last["avg_batch_cost"])
    dropped = skipped_rows(last)
    return Step("train", samples + sum(dropped.values()), samples, _sorted(dropped), str(folder))


def _sorted(dropped: dict[str, int]) -> dict[str, int]:
    return dict(sorted(((name, rows) for name, rows in dropped.items() if rows), key=lambda one: (-one[1], one[0])))
