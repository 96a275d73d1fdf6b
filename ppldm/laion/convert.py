"""`ppldm convert`: source rows become part files, a filelist and a manifest.

Laws. Rows in = rows out + rows skipped, by reason. Encoded images pass through untouched unless a treatment is asked
for; each is decoded once, as training will, as the check. The units of the source (`ppldm.laion.source`) are cut into
spans of rows_per_part rows, and each span makes a part, whether or not its rows can be used. A part is a function of
its span alone, so the output is the same to the byte for any number of processes or machines and after any
interruption. A part is finished when its record in `.convert/` is there and fits both the input and the part.

    OUT/parts/part-00000.gz, part-00000.gz.idx, ...
    OUT/NAME.filelist, OUT/NAME.filelist.list     relative names inside, so that OUT can be moved
    OUT/manifest.json                             written last
    OUT/forgotten.json                            what `ppldm forget` took out; such rows are never put in again
    OUT/.convert/                                 what the same command needs to go on; may be deleted when done
"""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from json import dumps
from pathlib import Path
from typing import Annotated

from ..data.filelist import write_filelist
from ..data.image import check_pixels, decode_pixels
from ..data.part import drop_indexes, index_path, write_part
from ..data.row import Row
from ..utils.errors import ConfigError, DataError, OutputError, PpldmError, RowError
from ..utils.files import file_sha256, local_path, make_output_dir, read_json, write_json
from ..utils.log import get_logger, progress
from ..utils.workers import check_workers, map_unordered
from .forgotten import FORGOTTEN, read_forgotten
from .reencode import Treatment, treat
from .source import NOT_DOWNLOADED, LoadableRow, Span, Unit, find_units
from .source_packed import PACKED, PackedUnit, pack
from .spark import is_submitted, spark_session

MAX_BAD_FRACTION = 0.5
_EXAMPLES_PER_REASON = 3
_MANY_SMALL_PARTS = 4  # so many times more parts than packed folders make deserve a word
# Part of every record: a change of what is written for the same input must change it.
_RECORD_VERSION = 2
# Of metadata: what says nothing of a picture that is there, and names of LAION's tables that have plainer ones.
_DROPPED_META = {"status", "error_message", "exif"}
_SPARK_MEMORY_GB = 1.0  # of the driver, which has little to do
_META_NAMES = {"AESTHETIC_SCORE": "aesthetic", "LANGUAGE": "language", "URL": "url"}


_UNTOUCHED = Treatment()


def convert(
    folder: str,  # folder of pictures and captions (0000.jpg + 0000.txt), img2dataset's output, or a file; see the docs
    out: Annotated[str, {"opt": True, "required": True}],  # folder for parts, filelists and manifest; made if missing
    name: str = "custom",  # names the filelists: OUT/NAME.filelist and OUT/NAME.filelist.list
    rows_per_part: int = 1000,  # rows of the input in one part file
    pack_folders: bool = False,  # fill parts with rows of several folders; else each folder makes parts of its own
    size: int = 0,  # shrink pictures whose short side is longer to it, in pixels; 0 leaves them as they are
    quality: int = 0,  # encode JPEG and WebP anew at this quality, 1 to 100; 0 leaves them as they are
    format: str = "",  # encode what is of another format as jpg, png or webp; default: leave it
    min_size: int = 0,  # skip pictures whose short side is shorter, in pixels
    normalise: bool = False,  # encode anew what is rotated by EXIF or transparent, for readers that ignore both
    num_workers: int = 0,  # processes; 0 means one per core. The output does not depend on it
    master: str = None,  # convert on a Spark cluster, such as spark://host:7077, whose nodes share the folders
    dry_run: bool = False,  # say what would be done and write nothing
    json: bool = False,  # print the manifest as JSON instead of a summary
):
    """Convert pictures and captions to part files.

    The source is a plain folder, what img2dataset wrote (files, webdataset, parquet), an annotated CSV file, JSON
    lines, a Hugging Face imagefolder or WebDataset tars. Training takes the result by
    --file_list OUT/NAME.filelist.list. Images go in as they are, byte for byte, unless --size, --quality, --format or
    --normalise asks otherwise; each is decoded once as a check. What cannot be used is skipped and counted by reason.
    Stopped at any point, the same command goes on; finished parts whose input has not changed are kept.
    """
    folder, out = local_path(folder), local_path(out)
    treatment = Treatment(size, quality, format, min_size, normalise)
    if dry_run:
        summary = plan_conversion(folder, out, rows_per_part, treatment, num_workers, pack_folders)
        text = (
            f"{summary['rows_in']} rows, {summary['parts']} part(s) of which {summary['parts_finished']} finished; "
            "nothing was written"
        )
    else:
        summary = convert_source(folder, out, name, rows_per_part, treatment, num_workers, master, pack_folders)
        text = describe(summary) + f"\ntrain with --file_list {Path(out, name)}.filelist.list"
    sys.stdout.write((dumps(summary, indent=2, ensure_ascii=False) if json else text) + "\n")


convert.aliases = {"--normalize": "--normalise"}


def convert_source(
    source,
    out,
    name: str = "custom",
    rows_per_part: int = 1000,
    treatment: Treatment = _UNTOUCHED,
    num_workers: int = 0,
    master: str | None = None,
    pack_folders: bool = False,
) -> dict:
    """Convert what the path `source` holds into the folder `out` and return the manifest.

    A folder takes the conversion of one source, by one name, rows_per_part and treatment. Raises ConfigError,
    OutputError, and DataError where more than half of the rows cannot be used.
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"--name {name!r} cannot name a file; use a plain word such as 'custom'")
    num_workers = check_workers(num_workers)
    tasks = _make_tasks(source, Path(out), rows_per_part, treatment, num_workers, pack_folders)
    _claim_folder(Path(out), source, name, rows_per_part, treatment, pack_folders)
    records = _make_parts(tasks, num_workers, master)
    _sweep(Path(out), name, {task.path.name for task in tasks})
    manifest = _merge_records(records, tasks, name, rows_per_part)
    _refuse_bad_source(manifest, source)
    write_filelist(Path(out, f"{name}.filelist"), [part["path"] for part in manifest["parts"]])
    write_filelist(Path(out, f"{name}.filelist.list"), [f"{name}.filelist"])
    write_json(Path(out, "manifest.json"), manifest)
    return manifest


def plan_conversion(
    source,
    out,
    rows_per_part: int = 1000,
    treatment: Treatment = _UNTOUCHED,
    num_workers: int = 0,
    pack_folders: bool = False,
) -> dict:
    """How many rows and parts there are and how many parts are finished, without writing."""
    tasks = _make_tasks(source, Path(out), rows_per_part, treatment, check_workers(num_workers), pack_folders)
    finished = sum(_finished_record(task, task.stamp()) is not None for task in tasks)
    return {"rows_in": sum(task.span.rows for task in tasks), "parts": len(tasks), "parts_finished": finished}


def describe(manifest: dict) -> str:
    """A manifest in one line, and one line more for each reason to skip rows."""
    num_bytes = sum(part["bytes"] for part in manifest["parts"])
    lines = [
        f"{manifest['rows_out']} of {manifest['rows_in']} rows in {len(manifest['parts'])} part(s), "
        f"{num_bytes / 1e6:.1f} MB"
    ]
    for reason, count in manifest["skipped"].items():
        example = manifest["examples"].get(reason)
        lines.append(f"  skipped, {reason}: {count}" + (f", for example {example[0]}" if example else ""))
    return "\n".join(lines)


@dataclass(frozen=True)
class _PartTask:
    """One part to be: its path and the source rows that belong to it. `source`: the unit's path in the whole source."""

    path: Path
    source: str
    unit: Unit
    span: Span
    treatment: Treatment

    @property
    def record_path(self) -> Path:
        return self.path.parent.parent / ".convert" / f"{self.path.name}.json"

    def stamp(self) -> str:
        """Tells this input from any other. It covers times of change, so it is kept out of the manifest."""
        stamps = [_RECORD_VERSION, self.unit.path.name, self.unit.stamp(self.span), vars(self.treatment)]
        return hashlib.sha256(dumps(stamps).encode()).hexdigest()


def _make_tasks(
    source, out: Path, rows_per_part: int, treatment: Treatment, num_workers: int, pack_folders: bool
) -> list[_PartTask]:
    if rows_per_part < 1:
        raise ConfigError(f"--rows-per-part is {rows_per_part}; it must be at least 1")
    units = find_units(source)
    spans = {}
    with progress(total=len(units), desc="counting rows", unit="unit", delay=3) as bar:
        for unit, found in map_unordered(partial(_spans_of, rows=rows_per_part), units, num_workers):
            spans[unit] = found
            bar.update()
    cut = [(unit, span) for unit in units for span in spans[unit]]
    if not cut:
        raise DataError(f"{source} holds no rows; name another source")
    packed = pack(cut, Path(source), rows_per_part)
    if pack_folders:
        cut = packed
    elif len(packed) * _MANY_SMALL_PARTS < len(cut):
        get_logger().warning("%d folders make %d parts; --pack-folders makes %d", len(units), len(cut), len(packed))
    return [
        _PartTask(out / "parts" / f"part-{number:05}.gz", _name_source(unit, source), unit, span, treatment)
        for number, (unit, span) in enumerate(cut)
    ]


def _name_source(unit: Unit, source) -> str:
    return PACKED if isinstance(unit, PackedUnit) else os.path.relpath(unit.path, source)


def _spans_of(unit: Unit, rows: int) -> list[Span]:
    return unit.spans(rows)


def _claim_folder(out: Path, source, name: str, rows_per_part: int, treatment: Treatment, pack_folders: bool) -> None:
    """Make the folders, and refuse where `out` holds parts that this conversion did not make.

    The source is remembered relative to `out`, so that both can be moved together.
    """
    plan = {"source": os.path.relpath(source, out), "name": name, "rows_per_part": rows_per_part}
    plan |= {option: value for option, value in vars(treatment).items() if value}
    plan |= {"pack_folders": True} if pack_folders else {}
    plan_path = out / ".convert" / "plan.json"
    remedy = "choose another --out, or delete that folder"
    if plan_path.is_file():
        earlier = read_json(plan_path)
        if earlier != plan:
            raise ConfigError(f"{out} holds another conversion ({earlier}, and this one is {plan}); {remedy}")
    elif any((out / "parts").glob("*")):
        raise OutputError(f"{out / 'parts'} holds files of unknown origin; {remedy}")
    make_output_dir(out / "parts")
    make_output_dir(out / ".convert")
    write_json(plan_path, plan)


def _make_parts(tasks: list[_PartTask], num_workers: int, master: str | None) -> list[dict]:
    """The records of all parts, in their order."""
    bar = progress(total=sum(task.span.rows for task in tasks), desc="convert", unit="row")
    records = {}
    with bar:
        on_spark = master or is_submitted()
        made = _make_on_spark(tasks, master) if on_spark else map_unordered(_make_part, tasks, num_workers)
        for task, record in made:
            records[task.path.name] = record
            bar.update(task.span.rows)
    kept = sum(record.pop("kept") for record in records.values())
    if kept:
        get_logger().info("%d of %d parts were finished already", kept, len(tasks))
    return [records[task.path.name] for task in tasks]


def _make_on_spark(tasks: list[_PartTask], master: str | None) -> Iterator[tuple[_PartTask, dict]]:
    """As `map_unordered(_make_part, ...)`, on the executors, a task each."""
    with spark_session(master, _SPARK_MEMORY_GB) as spark:
        tasks = [
            replace(task, path=task.path.absolute(), unit=replace(task.unit, path=task.unit.path.absolute()))
            for task in tasks
        ]
        made = spark.sparkContext.parallelize(tasks, len(tasks)).map(_try_to_make_part)
        for task, (record, error) in zip(tasks, made.toLocalIterator(prefetchPartitions=True), strict=True):
            if error:
                raise error
            yield task, record


def _try_to_make_part(task: _PartTask) -> tuple[dict | None, PpldmError | None]:
    """(record, None) or (None, error): Spark would wrap an error in two pages of Java."""
    try:
        return _make_part(task), None
    except PpldmError as error:
        return None, error


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
    record = read_json(task.record_path)
    if record is None or record.get("stamp") != stamp:
        return None
    for path, digest in ((task.path, record["sha256"]), (index_path(task.path), record["index_sha256"])):
        if (file_sha256(path) if path.is_file() else None) != digest:
            return None
    return record


def _write_part(task: _PartTask) -> dict:
    skipped, examples = Counter(), {}
    rows = _usable_rows(task, skipped, examples)
    first = next(rows, None)
    if first is None:
        task.path.unlink(missing_ok=True)
        drop_indexes(task.path)
    else:
        try:
            write_part(task.path, chain([first], rows))
        except OSError as error:
            raise OutputError(
                f"cannot write {task.path}: {error.strerror or error}; make room or choose another --out, then run the "
                "same command again"
            ) from error
    return {
        "rows_in": task.span.rows,
        "rows_out": task.span.rows - skipped.total(),
        "skipped": dict(sorted(skipped.items())),
        "examples": examples,
        "bytes": task.path.stat().st_size if first is not None else 0,
        "sha256": file_sha256(task.path) if first is not None else None,
        "index_sha256": file_sha256(index_path(task.path)) if first is not None else None,
    }


def _usable_rows(task: _PartTask, skipped: Counter, examples: dict) -> Iterator[Row]:
    """The rows that can be used, metadata filled in; the others go into `skipped` and `examples` by reason."""
    forgotten = read_forgotten(task.path.parent.parent)
    for source_row in task.unit.read(task.span):
        try:
            row = _make_row(source_row, task.treatment)
            if forgotten.covers(row.meta, task.source):
                skipped[FORGOTTEN] += 1
            else:
                yield row
        except RowError as error:
            skipped[error.reason] += 1
            examples.setdefault(error.reason, [])
            if len(examples[error.reason]) < _EXAMPLES_PER_REASON:
                examples[error.reason].append(f"{source_row.key!r}: {error}")


def _make_row(source_row: LoadableRow, treatment: Treatment) -> Row:
    """The row to write: what the source says of it, and over that what is known of these very bytes.

    Sizes are in pixels, after EXIF rotation. Raises RowError.
    """
    row = source_row.load()
    pixels = decode_pixels(row.image) if treatment.may_change_pixels else check_pixels(row.image)
    original = {"original_width": pixels.shape[1], "original_height": pixels.shape[0]}
    image, width, height = treat(row.image, pixels, treatment)
    said = {_META_NAMES.get(name, name): value for name, value in row.meta.items() if name not in _DROPPED_META}
    if said.get("caption") == row.caption:
        del said["caption"]
    known = {
        "key": source_row.key.rpartition("/")[2],
        "sha256": hashlib.sha256(image).hexdigest(),
        "width": width,
        "height": height,
    }
    return Row(row.caption, image, original | said | known)


def _sweep(out: Path, name: str, part_names: set[str]) -> None:
    """Remove what a killed run left half written, and parts of an earlier, longer state of the same source."""
    leftovers = [*out.glob(f".{name}.filelist*.tmp"), *out.glob(".manifest.json.*.tmp")]
    for folder in (out / "parts", out / ".convert"):
        leftovers += folder.glob(".*.tmp")
    for part in sorted((out / "parts").glob("part-*.gz")):
        if part.name not in part_names:
            get_logger().info("removing %s: the source has fewer rows than before", part)
            leftovers += [out / "manifest.json", out / ".convert" / f"{part.name}.json", part]
            drop_indexes(part)
    for path in leftovers:
        path.unlink(missing_ok=True)


def _merge_records(records: list[dict], tasks: list[_PartTask], name: str, rows_per_part: int) -> dict:
    skipped, examples, parts = Counter(), {}, []
    for number, (record, task) in enumerate(zip(records, tasks, strict=True)):
        skipped.update(record["skipped"])
        for reason, texts in record["examples"].items():
            examples[reason] = (examples.get(reason, []) + texts)[:_EXAMPLES_PER_REASON]
        if record["rows_out"]:
            path = f"parts/part-{number:05}.gz"
            facts = {"rows": record["rows_out"], "bytes": record["bytes"], "sha256": record["sha256"]}
            parts.append({"path": path, **facts, "source": task.source})
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
    bad = {reason: count for reason, count in manifest["skipped"].items() if reason not in (FORGOTTEN, NOT_DOWNLOADED)}
    num_bad, num_rows = sum(bad.values()), sum(bad.values()) + manifest["rows_out"]
    if num_bad > MAX_BAD_FRACTION * num_rows:
        reasons = "; ".join(
            f"{reason} {count}, for example {manifest['examples'][reason][0]}" for reason, count in bad.items()
        )
        raise DataError(
            f"{num_bad} of {num_rows} rows of {source} cannot be used: {reasons}; mend the source, then run the same "
            "command again"
        )
