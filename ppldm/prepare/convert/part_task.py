"""One part of a conversion: its source rows, its key and record, and how it is written. At an address, part and index
are made in a folder of this machine and put there, and known by the file system's checksums, or sizes and times.

On Spark, a part is a task or, where the source lies at an address, a unit is, which an executor copies to its own disk
once for all parts that are to be made of it; and once before, to count its rows.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, groupby
from pathlib import Path

from ...data.control import check_shape
from ...data.formats.layouts import CONTROL_LAYOUT
from ...data.formats.part import described_by, drop_indexes, index_path, write_part
from ...data.formats.row import EXAMPLES_PER_REASON, GUESSED_ENCODING, Row, noting_other_text
from ...data.images import check_pixels, decode_pixels, has_other_profile
from ...utils.checksums import hash_file
from ...utils.errors import RowError
from ...utils.files import write_json
from ...utils.finished import finish, list_pieces, make_key, take_state
from ...utils.machine.spark import DRIVER_MEMORY_GB, run_tasks, spark_session
from ...utils.text import as_json
from ..block_list import BLOCKED, NOTHING, BlockList
from ..place import AddressPath, Hadoop, fingerprint_of, local_folder, put_files, reaching
from ..provenance.forgotten import FORGOTTEN, Forgotten
from .reencode import Treatment, treat
from .units import Span, Unit

# Part of every record: a change of what is written for the same input must change it.
_RECORD_VERSION = 4
OTHER_PROFILES = "other_profiles"  # of records and manifests, how many rows have one
ENCODED_ANEW = "encoded_anew"  # the same of pictures that do not go through as they are
# Of metadata: what says nothing of a picture that is there, and names of LAION's tables that have plainer ones.
_DROPPED_META = {"status", "error_message", "exif"}
_META_NAMES = {"AESTHETIC_SCORE": "aesthetic", "LANGUAGE": "language", "URL": "url"}


@dataclass(frozen=True)
class PartTask:
    """Source rows and the path of their part. `source`: the unit's path in the whole source. `copy`: gives the unit's
    copy here, where it lies at an address. `blocked`: rows to leave out. `caption_encoding`: of text not in UTF-8."""

    path: Path | AddressPath
    source: str
    unit: Unit
    span: Span
    treatment: Treatment
    copy: Callable[[], Unit] | None = None
    blocked: BlockList = NOTHING
    caption_encoding: str = GUESSED_ENCODING

    @property
    def out(self) -> Path | AddressPath:
        """The folder of the whole conversion."""
        return self.path.parent.parent

    @property
    def record_path(self) -> Path | AddressPath:
        return self.out / ".convert" / f"{self.path.name}.json"

    def key(self) -> dict:
        """Settings, and the fingerprint of the input, which is the whole unit's at an address."""
        place = {"version": _RECORD_VERSION, "unit": self.unit.path.name, "start": self.span.start}
        settings = place | {"rows": self.span.rows} | self.treatment.settings()
        settings |= {"sides": "rounded down"} if self.treatment.size else {}
        settings |= {"layout": CONTROL_LAYOUT} if self.unit.has_control else {}
        settings |= {"columns": list(self.unit.columns)} if any(self.unit.columns) else {}
        settings |= self.blocked.settings | encoding_settings(self.caption_encoding)
        unit = self.unit.path
        if isinstance(unit, AddressPath):
            return {"settings": as_json(settings), "input": fingerprint_of([unit])}
        with noting_other_text(self.caption_encoding):
            return make_key(settings, self.unit.input_pieces(self.span), self.record_path)


def make_part(task: PartTask) -> dict:
    """Write one part unless it is finished; return its record, with `kept` saying which."""
    key = task.key()  # before the first byte is read, so that a later change is seen
    record, kept = finish(task.record_path, key, partial(is_whole, task), partial(_write_part, task))
    output = {"output": _output_state(task)}
    if record | output != record:
        write_json(task.record_path, record | output)
    return record | {"kept": kept}


def _output_state(task: PartTask) -> str:
    if isinstance(task.path, AddressPath):
        return fingerprint_of([path for path in files_of(task.path) if path.exists()])["state"]
    return take_state(piece for path in (task.path, index_path(task.path)) for piece in list_pieces(path))


def is_whole(task: PartTask, record: dict) -> bool:
    """Whether part and index are those of a record."""
    if record.get("output") == _output_state(task):
        return True
    if isinstance(task.path, AddressPath):
        return False
    files = {task.path: record["sha256"], index_path(task.path): record["index_sha256"]}
    return all((hash_file(path) if path.is_file() else None) == digest for path, digest in files.items())


def _write_part(task: PartTask) -> dict:
    # From here to the end of the conversion the old manifest would lie.
    (task.out / "manifest.json").unlink(missing_ok=True)
    forgotten = Forgotten.read(task.out)
    if not isinstance(task.path, AddressPath):
        return _write_rows(task, task.path, forgotten) | {"output": _output_state(task)}
    with local_folder(task.path.parent) as folder:
        part = folder / task.path.name
        record = _write_rows(task, part, forgotten)
        files = zip(files_of(part), files_of(task.path), strict=True)
        put_files({path: target for path, target in files if path.exists()}, files_of(task.path), task.out / ".convert")
    return record | {"output": _output_state(task)}


def files_of(part: Path | AddressPath) -> list[Path | AddressPath]:
    """A part and what describes it beside it."""
    return [part, *(part.parent / path.name for path in described_by(Path(part.name)))]


def _write_rows(task: PartTask, path: Path, forgotten: Forgotten) -> dict:
    """Write the part to `path`, or nothing where no row can be used; return its record, but for `output`."""
    skipped, examples, told = Counter(), {}, Counter()

    def read_usable() -> Iterator[Row]:
        for key, loaded in (task.copy() if task.copy else task.unit).read(task.span):
            try:
                if isinstance(loaded, RowError):
                    raise loaded
                row = _make_row(key, loaded, task)
                if row is None:
                    skipped[BLOCKED] += 1
                elif forgotten.covers(row.meta, task.source):
                    skipped[FORGOTTEN] += 1
                else:
                    if has_other_profile(loaded.image):
                        told[OTHER_PROFILES] += 1
                    if row.image is not loaded.image:
                        told[ENCODED_ANEW] += 1
                    noted.end_row(repr(key))
                    yield row
            except RowError as error:
                skipped[error.reason] += 1
                texts = examples.setdefault(error.reason, [])
                if len(texts) < EXAMPLES_PER_REASON:
                    texts.append(f"{key!r}: {error}")
            noted.found.clear()

    files: dict = {"bytes": 0, "sha256": None, "index_sha256": None}
    with noting_other_text(task.caption_encoding) as noted:
        rows = read_usable()
        if (first := next(rows, None)) is None:
            drop_indexes(path)
            path.unlink(missing_ok=True)
        else:
            write_part(path, chain([first], rows))
            files = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
            files["index_sha256"] = hash_file(index_path(path))
    record: dict = {"rows_in": task.span.rows, "rows_out": task.span.rows - skipped.total()}
    record |= {"skipped": dict(sorted(skipped.items())), "examples": examples}
    return record | files | told | noted.report


def encoding_settings(caption_encoding: str) -> dict:
    """As part of the settings of a conversion."""
    return {"caption_encoding": caption_encoding} if caption_encoding != GUESSED_ENCODING else {}


def _make_row(key: str, row: Row, task: PartTask) -> Row | None:
    """What the source says of a row, and over that what is known of these very bytes, sizes after EXIF rotation; None
    where the block list has its URL, or its file as it came, is, or would be written. Raises RowError."""
    treatment = task.treatment
    if task.blocked.settings and _is_blocked(row, row.image, task.blocked):
        return None
    # Where none may change, every plain JPEG passes as it is: one without EXIF data.
    may_change_pixels = treatment.size or treatment.quality or treatment.format
    pixels = decode_pixels(row.image) if may_change_pixels else check_pixels(row.image)
    original = {"original_width": pixels.shape[1], "original_height": pixels.shape[0]}
    image, width, height = treat(row.image, pixels, treatment)
    if image is not row.image and _is_blocked(row, image, task.blocked):
        return None
    said = {_META_NAMES.get(name, name): value for name, value in row.meta.items() if name not in _DROPPED_META}
    if said.get("caption") == row.caption:
        del said["caption"]
    known: dict = {"key": key.rpartition("/")[2], "sha256": hashlib.sha256(image).hexdigest()}
    known |= {"width": width, "height": height}
    control = b""
    if row.control:  # the second image, as small as the first and in its own encoding
        second = decode_pixels(row.control)
        check_shape(second.shape[:2], pixels.shape[:2])
        own = Treatment(treatment.size, normalise=treatment.normalise)
        control, _, _ = treat(row.control, second, own)
    return Row(row.caption, image, original | said | known, control=control)


def _is_blocked(row: Row, image: bytes, blocked: BlockList) -> bool:
    urls = (row.meta.get(name) for name in ("url", "URL"))
    digest = hashlib.sha256(image).hexdigest() if blocked.hashes else None
    return any(blocked.names(url, digest, row.meta.get("sha256")) for url in urls)


def make_on_spark(tasks: Sequence[PartTask], master: str | None) -> Iterator[tuple[PartTask, dict]]:
    """(task, its record as `make_part` gives it) of all tasks in their order."""
    with spark_session(master, DRIVER_MEMORY_GB) as spark:
        tasks = [
            replace(task, path=task.path.absolute(), unit=replace(task.unit, path=task.unit.path.absolute()))
            for task in tasks
        ]
        is_remote = isinstance(tasks[0].unit.path, AddressPath)
        groups = [list(group) for _, group in groupby(tasks, key=lambda task: task.unit if is_remote else task)]
        hadoop = Hadoop.of(spark).settings() if is_remote or isinstance(tasks[0].path, AddressPath) else None
        for group, records in run_tasks(spark, "convert", groups, partial(_make_parts, hadoop=hadoop)):
            yield from zip(group, records, strict=True)


def count_on_spark(units: Sequence[Unit], rows: int, master: str | None) -> Iterator[tuple[Unit, list[Span]]]:
    """(unit, its spans of at most that many rows) of units at an address."""
    with spark_session(master, DRIVER_MEMORY_GB) as spark:
        count = partial(_count_spans, rows=rows, hadoop=Hadoop.of(spark).settings())
        yield from run_tasks(spark, "counting rows", units, count)


def _make_parts(tasks: list[PartTask], hadoop: str | None) -> list[dict]:
    if hadoop is None:
        return list(map(make_part, tasks))
    unit, copy = tasks[0].unit, None
    with reaching(hadoop) as client, local_folder(unit.path.parent) as folder:
        if isinstance(unit.path, AddressPath):
            unit = replace(unit, path=unit.path.at(client))
            copy = cache(partial(_fetch, unit, folder))
        paths = [task.path.at(client) if isinstance(task.path, AddressPath) else task.path for task in tasks]
        made = (replace(task, path=path, unit=unit, copy=copy) for task, path in zip(tasks, paths, strict=True))
        return list(map(make_part, made))


def _count_spans(unit: Unit, rows: int, hadoop: str) -> list[Span]:
    with reaching(hadoop) as client, local_folder(unit.path.parent) as folder:
        return _fetch(replace(unit, path=unit.path.at(client)), folder).spans(rows)


def _fetch(unit: Unit, folder: Path) -> Unit:
    """A unit's copy in a folder of this machine."""
    unit.path.fetch(folder / unit.path.name)
    return replace(unit, path=folder / unit.path.name)
