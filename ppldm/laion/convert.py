"""`ppldm convert`: source rows become part files, a filelist and a manifest.

Laws. Rows in = rows out + rows skipped, by reason. Encoded images pass through untouched; each is decoded once, as
training will, as the check. Row i in the order of keys belongs to part i // rows_per_part whether or not it can be
used, and each part is a function of its rows alone, so the output is the same to the byte for any number of processes
and after any interruption. A part is finished when its record in `.convert/` is there and fits both the input and the
part.

    OUT/parts/part-00000.gz, part-00000.gz.idx, ...
    OUT/NAME.filelist, OUT/NAME.filelist.list     relative names inside, so that OUT can be moved
    OUT/manifest.json                             written last
    OUT/.convert/                                 what the same command needs to go on; may be deleted when done
"""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from json import JSONDecodeError, dumps, loads
from pathlib import Path
from typing import Annotated

from ..data.filelist import write_filelist
from ..data.image import decode_pixels
from ..data.part import index_path, write_part
from ..data.row import Row
from ..utils.errors import ConfigError, DataError, OutputError, RowError
from ..utils.files import make_output_dir, write_json
from ..utils.log import get_logger, progress
from ..utils.workers import check_workers, map_unordered
from .source import SourceRow, read_folder

MAX_BAD_FRACTION = 0.5
_EXAMPLES_PER_REASON = 3
# Part of every record: a change of what is written for the same input must change it.
_RECORD_VERSION = 1


def convert(
    folder: str,  # folder of pictures with captions: 0000.jpg (or .jpeg .png .webp) + 0000.txt (+ 0000.json, metadata)
    out: Annotated[str, {"opt": True, "required": True}],  # folder for parts, filelists and manifest; made if missing
    name: str = "custom",  # names the filelists: OUT/NAME.filelist and OUT/NAME.filelist.list
    rows_per_part: int = 1000,  # rows of the input in one part file
    num_workers: int = 0,  # processes; 0 means one per core. The output does not depend on it
    dry_run: bool = False,  # say what would be done and write nothing
    json: bool = False,  # print the manifest as JSON instead of a summary
):
    """Convert a folder of pictures and captions to part files.

    Training takes them by `--file_list OUT/NAME.filelist.list`. Images go in as they are, byte for byte; each is
    decoded once as a check. What cannot be used is skipped and counted by reason. Stopped at any point, the same
    command goes on; finished parts whose input has not changed are kept.
    """
    rows = read_folder(folder)
    if dry_run:
        summary = plan_conversion(rows, out, rows_per_part)
        text = (
            f"{summary['rows_in']} rows, {summary['parts']} part(s) of which {summary['parts_finished']} finished; "
            "nothing was written"
        )
    else:
        summary = convert_rows(rows, folder, out, name, rows_per_part, num_workers)
        text = describe(summary) + f"\ntrain with --file_list {Path(out, name)}.filelist.list"
    sys.stdout.write((dumps(summary, indent=2, ensure_ascii=False) if json else text) + "\n")


def convert_rows(rows: Iterable, source, out, name="custom", rows_per_part=1000, num_workers=0) -> dict:
    """Convert the rows of a source (see `ppldm.laion.source`) into the folder `out` and return the manifest.

    `source` is the path the rows come from: a folder takes the conversion of one source, one name and one
    rows_per_part. Raises ConfigError, OutputError, and DataError where more than half of the rows cannot be used.
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"--name {name!r} cannot name a file; use a plain word such as 'custom'")
    num_workers = check_workers(num_workers)
    tasks = _make_tasks(rows, Path(out), rows_per_part)
    _claim_folder(Path(out), source, name, rows_per_part)
    records = _make_parts(tasks, num_workers)
    _sweep(Path(out), name, {task.path.name for task in tasks})
    manifest = _merge_records(records, name, rows_per_part)
    _refuse_bad_source(manifest, source)
    write_filelist(Path(out, f"{name}.filelist"), [part["path"] for part in manifest["parts"]])
    write_filelist(Path(out, f"{name}.filelist.list"), [f"{name}.filelist"])
    write_json(Path(out, "manifest.json"), manifest)
    return manifest


def plan_conversion(rows: Iterable, out, rows_per_part=1000) -> dict:
    """How many rows and parts there are and how many parts are finished, without writing."""
    tasks = _make_tasks(rows, Path(out), rows_per_part)
    finished = sum(_finished_record(task, task.stamp()) is not None for task in tasks)
    return {"rows_in": sum(len(task.rows) for task in tasks), "parts": len(tasks), "parts_finished": finished}


def describe(manifest: dict) -> str:
    """A manifest in one line, and one line more for each reason to skip rows."""
    num_bytes = sum(part["bytes"] for part in manifest["parts"])
    lines = [
        f"{manifest['rows_out']} of {manifest['rows_in']} rows in {len(manifest['parts'])} part(s), "
        f"{num_bytes / 1e6:.1f} MB"
    ]
    for reason, count in manifest["skipped"].items():
        lines.append(f"  skipped, {reason}: {count}, for example {manifest['examples'][reason][0]}")
    return "\n".join(lines)


@dataclass(frozen=True)
class _PartTask:
    """One part to be: its path and the source rows that belong to it."""

    path: Path
    rows: tuple[SourceRow, ...]

    @property
    def record_path(self) -> Path:
        return self.path.parent.parent / ".convert" / f"{self.path.name}.json"

    def stamp(self) -> str:
        """Tells this input from any other. It covers times of change, so it is kept out of the manifest."""
        stamps = [_RECORD_VERSION, *(row.stamp() for row in self.rows)]
        return hashlib.sha256(dumps(stamps).encode()).hexdigest()


def _make_tasks(rows: Iterable, out: Path, rows_per_part: int) -> list[_PartTask]:
    if rows_per_part < 1:
        raise ConfigError(f"--rows-per-part is {rows_per_part}; it must be at least 1")
    rows = sorted(rows, key=lambda row: row.key)
    runs = [tuple(rows[start : start + rows_per_part]) for start in range(0, len(rows), rows_per_part)]
    return [_PartTask(out / "parts" / f"part-{number:05}.gz", run) for number, run in enumerate(runs)]


def _claim_folder(out: Path, source, name: str, rows_per_part: int) -> None:
    """Make the folders, and refuse where `out` holds parts that this conversion did not make.

    The source is remembered relative to `out`, so that both can be moved together.
    """
    plan = {"source": os.path.relpath(source, out), "name": name, "rows_per_part": rows_per_part}
    plan_path = out / ".convert" / "plan.json"
    remedy = "choose another --out, or delete that folder"
    if plan_path.is_file():
        earlier = _read_json(plan_path)
        if earlier != plan:
            raise ConfigError(f"{out} holds another conversion ({earlier}, and this one is {plan}); {remedy}")
    elif any((out / "parts").glob("*")):
        raise OutputError(f"{out / 'parts'} holds files of unknown origin; {remedy}")
    make_output_dir(out / "parts")
    make_output_dir(out / ".convert")
    write_json(plan_path, plan)


def _make_parts(tasks: list[_PartTask], num_workers: int) -> list[dict]:
    """The records of all parts, in their order."""
    bar = progress(total=sum(len(task.rows) for task in tasks), desc="convert", unit="row")
    records = {}
    with bar:
        for task, record in map_unordered(_make_part, tasks, num_workers):
            records[task.path.name] = record
            bar.update(len(task.rows))
    kept = sum(record.pop("kept") for record in records.values())
    if kept:
        get_logger().info("%d of %d parts were finished already", kept, len(tasks))
    return [records[task.path.name] for task in tasks]


def _make_part(task: _PartTask) -> dict:
    """Write one part unless it is finished; return its record, with `kept` saying which."""
    stamp = task.stamp()
    record = _finished_record(task, stamp)
    if record is not None:
        return record | {"kept": True}
    # From here to the end of the conversion the old manifest would lie.
    Path(task.path.parent.parent, "manifest.json").unlink(missing_ok=True)
    task.record_path.unlink(missing_ok=True)
    record = _write_part(task) | {"stamp": stamp}
    write_json(task.record_path, record)
    return record | {"kept": False}


def _finished_record(task: _PartTask, stamp: str) -> dict | None:
    """The record of a part that is as this input makes it; None where anything is missing or differs."""
    record = _read_json(task.record_path)
    if record is None or record.get("stamp") != stamp:
        return None
    for path, digest in ((task.path, record["sha256"]), (index_path(task.path), record["index_sha256"])):
        if (_file_sha256(path) if path.is_file() else None) != digest:
            return None
    return record


def _write_part(task: _PartTask) -> dict:
    skipped, examples = Counter(), {}
    rows = _usable_rows(task.rows, skipped, examples)
    first = next(rows, None)
    if first is None:
        task.path.unlink(missing_ok=True)
        index_path(task.path).unlink(missing_ok=True)
    else:
        try:
            write_part(task.path, chain([first], rows))
        except OSError as error:
            raise OutputError(
                f"cannot write {task.path}: {error.strerror or error}; make room or choose another --out, then run the "
                "same command again"
            ) from error
    return {
        "rows_in": len(task.rows),
        "rows_out": len(task.rows) - skipped.total(),
        "skipped": dict(sorted(skipped.items())),
        "examples": examples,
        "bytes": task.path.stat().st_size if first is not None else 0,
        "sha256": _file_sha256(task.path) if first is not None else None,
        "index_sha256": _file_sha256(index_path(task.path)) if first is not None else None,
    }


def _usable_rows(rows: Iterable[SourceRow], skipped: Counter, examples: dict) -> Iterator[Row]:
    """The rows that can be used, metadata filled in; the others go into `skipped` and `examples` by reason."""
    for source_row in rows:
        try:
            row = source_row.load()
            height, width, _ = decode_pixels(row.image).shape
        except RowError as error:
            skipped[error.reason] += 1
            examples.setdefault(error.reason, [])
            if len(examples[error.reason]) < _EXAMPLES_PER_REASON:
                examples[error.reason].append(f"{source_row.key!r}: {error}")
            continue
        yield Row(row.caption, row.image, _fill_meta(row, source_row.key, width, height))


def _fill_meta(row: Row, key: str, width: int, height: int) -> dict:
    """What the source says, and over it what is known of these very bytes. Sizes in pixels, after EXIF rotation."""
    size = {"original_width": width, "original_height": height}
    known = {"key": key, "sha256": hashlib.sha256(row.image).hexdigest(), "width": width, "height": height}
    return size | row.meta | known


def _sweep(out: Path, name: str, part_names: set[str]) -> None:
    """Remove what a killed run left half written, and parts of an earlier, longer state of the same source."""
    leftovers = [*out.glob(f".{name}.filelist*.tmp"), *out.glob(".manifest.json.*.tmp")]
    for folder in (out / "parts", out / ".convert"):
        leftovers += folder.glob(".*.tmp")
    for part in sorted((out / "parts").glob("part-*.gz")):
        if part.name not in part_names:
            get_logger().info("removing %s: the source has fewer rows than before", part)
            leftovers += [out / "manifest.json", out / ".convert" / f"{part.name}.json", part, index_path(part)]
    for path in leftovers:
        path.unlink(missing_ok=True)


def _merge_records(records: list[dict], name: str, rows_per_part: int) -> dict:
    skipped, examples, parts = Counter(), {}, []
    for number, record in enumerate(records):
        skipped.update(record["skipped"])
        for reason, texts in record["examples"].items():
            examples[reason] = (examples.get(reason, []) + texts)[:_EXAMPLES_PER_REASON]
        if record["rows_out"]:
            path = f"parts/part-{number:05}.gz"
            parts.append({"path": path, "rows": record["rows_out"]} | {k: record[k] for k in ("bytes", "sha256")})
    return {
        "name": name,
        "rows_per_part": rows_per_part,
        "rows_in": sum(record["rows_in"] for record in records),
        "rows_out": sum(record["rows_out"] for record in records),
        "skipped": dict(sorted(skipped.items())),
        "examples": dict(sorted(examples.items())),
        "parts": parts,
    }


def _refuse_bad_source(manifest: dict, source) -> None:
    num_bad = manifest["rows_in"] - manifest["rows_out"]
    if num_bad > MAX_BAD_FRACTION * manifest["rows_in"]:
        reasons = "; ".join(
            f"{reason} {count}, for example {manifest['examples'][reason][0]}"
            for reason, count in manifest["skipped"].items()
        )
        raise DataError(
            f"{num_bad} of {manifest['rows_in']} rows of {source} cannot be used: {reasons}; mend the source, then run "
            "the same command again"
        )


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_json(path: Path):
    """The JSON in a file of ours; None where the file is missing or damaged."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, JSONDecodeError, UnicodeDecodeError):
        return None
