"""`ppldm convert`: source rows become part files, a filelist and a manifest.

Laws. Rows in = rows out + rows skipped, by reason. Encoded images pass through untouched unless a treatment is asked
for; each is decoded once, as training will, as the check. The units of the source (`convert.source`) are cut into
spans of rows_per_part rows, and each span makes a part, whether or not its rows can be used. A part is a function of
only its span, so the output is the same to the byte for any number of processes or machines and after any
interruption. A part is finished when its record in `.convert/` is there and fits both the input and the part
(`ppldm.utils.jobs` has the rule).

    OUT/parts/part-00000.gz, part-00000.gz.idx, ...
    OUT/NAME.filelist, OUT/NAME.filelist.list     relative names inside, so that OUT can be moved
    OUT/manifest.json                             written last
    OUT/forgotten.json                            what `ppldm forget` took out; such rows are never put in again
    OUT/.convert/                                 what the same command needs to go on; may be deleted when done
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

from ...data.bad_rows import EXAMPLES_PER_REASON
from ...data.filelist import write_filelist
from ...data.formats.part import drop_indexes, index_path, write_part
from ...data.formats.row import Row
from ...data.images.decode import check_pixels, decode_pixels
from ...utils.checksums import file_sha256
from ...utils.errors import ConfigError, DataError, PpldmError, RowError
from ...utils.files import local_path, write_json
from ...utils.jobs import JobFolder, find_finished, finish, list_pieces, make_key, take_state
from ...utils.log import get_logger, progress
from ...utils.report import print_report
from ...utils.workers import check_workers, map_unordered
from ..provenance.forgotten import FORGOTTEN, read_forgotten
from ..spark import is_submitted, spark_session
from .converted import merge_records, refuse_bad_source
from .packed import PACKED, PackedUnit, pack
from .reencode import Treatment, treat
from .source import find_units
from .units import SourceRow, Span, Unit

_MANY_SMALL_PARTS = 4  # so many times more parts than packed folders make deserve a word
# Part of every record: a change of what is written for the same input must change it.
_RECORD_VERSION = 3
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
    redo: bool = False,  # make parts again that were made with other settings, or from another source
    dry_run: bool = False,  # say what would be done and write nothing
    json: bool = False,  # print the manifest as JSON instead of a summary
):
    """Convert pictures and captions to part files.

    The source is a plain folder, what img2dataset wrote (files, webdataset, parquet), an annotated CSV file, JSON
    lines, a Hugging Face imagefolder or WebDataset tars. Training takes the result by
    --file_list OUT/NAME.filelist.list. Images go in as they are, byte for byte, unless --size, --quality, --format or
    --normalise asks otherwise; each is decoded once as a check. What cannot be used is skipped and counted by reason.
    Stopped at any point, the same command goes on; finished parts whose input has not changed are kept, the others made
    again.
    """
    folder, out = local_path(folder), local_path(out)
    treatment = Treatment(size, quality, format, min_size, normalise)
    if dry_run:
        summary = plan_conversion(folder, out, rows_per_part, treatment, num_workers, pack_folders, name, redo)
        print_report(summary, _describe_plan, json)
    else:
        summary = convert_source(folder, out, name, rows_per_part, treatment, num_workers, master, pack_folders, redo)
        advice = f"\ntrain with --file_list {Path(out, name)}.filelist.list"
        print_report(summary, lambda manifest: describe(manifest) + advice, json)


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
    redo: bool = False,
) -> dict:
    """Convert what the path `source` holds into the folder `out` and return the manifest.

    A folder takes the conversion of one source, by one name, rows_per_part and treatment; with `redo`, of others too.
    Raises ConfigError, OutputError, and DataError where more than half of the rows cannot be used.
    """
    job, settings, num_workers = _prepare(source, out, name, rows_per_part, treatment, num_workers, pack_folders)
    job.check(settings, redo)
    tasks = _make_tasks(source, Path(out), rows_per_part, treatment, num_workers, pack_folders)
    earlier = (job.plan or settings).get("name", name)

    def clear() -> None:
        for left in ("manifest.json", f"{earlier}.filelist", f"{earlier}.filelist.list"):
            Path(out, left).unlink(missing_ok=True)

    with job.claimed(settings, redo, clear=clear):
        records = _make_parts(tasks, num_workers, master)
        _sweep(Path(out), {name, earlier}, {task.path.name for task in tasks})
        manifest = merge_records(records, [task.source for task in tasks], name, rows_per_part)
        refuse_bad_source(manifest, source)
        write_filelist(Path(out, f"{name}.filelist"), [part["path"] for part in manifest["parts"]])
        write_filelist(Path(out, f"{name}.filelist.list"), [f"{name}.filelist"])
        write_json(Path(out, "manifest.json"), manifest)
    return manifest


def check_conversion(
    folder, out, name="custom", rows_per_part=1000, num_workers=0, pack_folders=False, redo=False, **options
) -> None:
    """Find what `convert`, whose arguments these are, would refuse before it looks at the source. Raises PpldmError."""
    options.pop("master", None)
    job, settings, _ = _prepare(folder, out, name, rows_per_part, Treatment(**options), num_workers, pack_folders)
    job.check(settings, redo)


def plan_conversion(
    source,
    out,
    rows_per_part: int = 1000,
    treatment: Treatment = _UNTOUCHED,
    num_workers: int = 0,
    pack_folders: bool = False,
    name: str = "custom",
    redo: bool = False,
) -> dict:
    """How many rows and parts there are and how many parts are finished, without writing. Raises as the conversion."""
    job, settings, num_workers = _prepare(source, out, name, rows_per_part, treatment, num_workers, pack_folders)
    job.check(settings, redo)
    tasks = _make_tasks(source, Path(out), rows_per_part, treatment, num_workers, pack_folders)
    finished = sum(find_finished(task.record_path, task.key(), partial(_is_whole, task)) is not None for task in tasks)
    return {"rows_in": sum(task.span.rows for task in tasks), "parts": len(tasks), "parts_finished": finished}


def _describe_plan(plan: dict) -> str:
    parts = f"{plan['parts']} part(s) of which {plan['parts_finished']} finished"
    return f"{plan['rows_in']} rows, {parts}; nothing was written"


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

    def key(self) -> dict:
        """Settings, and the fingerprint of the input. It covers times of change, so it is kept out of the manifest."""
        place = {"version": _RECORD_VERSION, "unit": self.unit.path.name, "start": self.span.start}
        settings = place | {"rows": self.span.rows} | vars(self.treatment)
        return make_key(settings, self.unit.input_pieces(self.span), self.record_path)


def _prepare(
    source, out, name: str, rows_per_part: int, treatment: Treatment, num_workers: int, pack_folders: bool
) -> tuple[JobFolder, dict, int]:
    """The folder, the settings that it is claimed with, the number of processes. Raises ConfigError.

    The source is remembered relative to `out`, so that both can be moved together.
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"--name {name!r} cannot name a file; use a plain word such as 'custom'")
    if rows_per_part < 1:
        raise ConfigError(f"--rows-per-part is {rows_per_part}; it must be at least 1")
    settings = {"source": os.path.relpath(source, out), "name": name, "rows_per_part": rows_per_part}
    settings |= {option: value for option, value in vars(treatment).items() if value}
    settings |= {"pack_folders": True} if pack_folders else {}
    return JobFolder(Path(out), ".convert", "conversion", "parts"), settings, check_workers(num_workers)


def _make_tasks(
    source, out: Path, rows_per_part: int, treatment: Treatment, num_workers: int, pack_folders: bool
) -> list[_PartTask]:
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
    key = task.key()  # before the first byte is read, so that a later change is seen
    record, kept = finish(task.record_path, key, partial(_is_whole, task), partial(_write_part, task))
    output = {"output": _output_state(task)}
    if record | output != record:
        write_json(task.record_path, record | output)
    return record | {"kept": kept}


def _output_state(task: _PartTask) -> str:
    return take_state(piece for path in (task.path, index_path(task.path)) for piece in list_pieces(path))


def _is_whole(task: _PartTask, record: dict) -> bool:
    """Whether part and index are those of a record."""
    if record.get("output") == _output_state(task):
        return True
    files = {task.path: record["sha256"], index_path(task.path): record["index_sha256"]}
    return all((file_sha256(path) if path.is_file() else None) == digest for path, digest in files.items())


def _write_part(task: _PartTask) -> dict:
    # From here to the end of the conversion the old manifest would lie.
    Path(task.path.parent.parent, "manifest.json").unlink(missing_ok=True)
    skipped, examples = Counter(), {}
    rows = _usable_rows(task, skipped, examples)
    first = next(rows, None)
    if first is None:
        task.path.unlink(missing_ok=True)
        drop_indexes(task.path)
    else:
        write_part(task.path, chain([first], rows))
    return {
        "rows_in": task.span.rows,
        "rows_out": task.span.rows - skipped.total(),
        "skipped": dict(sorted(skipped.items())),
        "examples": examples,
        "bytes": task.path.stat().st_size if first is not None else 0,
        "sha256": file_sha256(task.path) if first is not None else None,
        "index_sha256": file_sha256(index_path(task.path)) if first is not None else None,
        "output": _output_state(task),
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
            if len(examples[error.reason]) < EXAMPLES_PER_REASON:
                examples[error.reason].append(f"{source_row.key!r}: {error}")


def _make_row(source_row: SourceRow, treatment: Treatment) -> Row:
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


def _sweep(out: Path, names: set[str], component_names: set[str]) -> None:
    """Remove what a killed run left half written, and parts of an earlier, longer state of the same source."""
    leftovers = [*out.glob(".manifest.json.*.tmp")]
    for name in names:
        leftovers += out.glob(f".{name}.filelist*.tmp")
    for folder in (out / "parts", out / ".convert"):
        leftovers += folder.glob(".*.tmp")
    for part in sorted((out / "parts").glob("part-*.gz")):
        if part.name not in component_names:
            get_logger().info("removing %s: the source has fewer rows than before", part)
            leftovers += [out / "manifest.json", out / ".convert" / f"{part.name}.json", part]
            drop_indexes(part)
    for path in leftovers:
        path.unlink(missing_ok=True)
