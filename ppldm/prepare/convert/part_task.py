"""One part of a conversion: the source rows that belong to it, its key and record, and how it is written.

A part is a function of only its span. Of a part at an address, part and index are made in a folder of this machine and
put there. Whether they are those of the record is then seen by the file system's checksums, or sizes and times.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from ...data.control.cut import check_shape
from ...data.formats.layouts import CONTROL_LAYOUT
from ...data.formats.part import described_by, drop_indexes, index_path, write_part
from ...data.formats.row import EXAMPLES_PER_REASON, GUESSED_ENCODING, OtherText, Row, noting_other_text
from ...data.images.decode import check_pixels, decode_pixels, has_other_profile
from ...utils.checksums import file_sha256
from ...utils.errors import RowError
from ...utils.files import write_json
from ...utils.jobs import finish, list_pieces, make_key, take_state
from ...utils.text import as_json
from ..block_list import BLOCKED, NOTHING, BlockList
from ..place import AddressPath, fingerprint_of, local_folder, put_files
from ..provenance.forgotten import FORGOTTEN, Forgotten, read_forgotten
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
    """One part to be: its path and the source rows that belong to it. `source`: the unit's path in the whole source.

    `copy`: gives the unit's copy on this machine, where it lies at an address. `blocked`: rows that must not be in it.
    `caption_encoding`: of text that is not UTF-8."""

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
        """The record of the part."""
        return self.out / ".convert" / f"{self.path.name}.json"

    def key(self) -> dict:
        """Settings, and the fingerprint of the input, which is the whole unit's at an address. It covers times of
        change, so it is kept out of the manifest."""
        place = {"version": _RECORD_VERSION, "unit": self.unit.path.name, "start": self.span.start}
        settings = place | {"rows": self.span.rows} | self.treatment.settings()
        settings |= {"sides": "rounded down"} if self.treatment.size else {}
        settings |= {"layout": CONTROL_LAYOUT} if self.unit.has_control else {}
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
    return all((file_sha256(path) if path.is_file() else None) == digest for path, digest in files.items())


def _write_part(task: PartTask) -> dict:
    # From here to the end of the conversion the old manifest would lie.
    (task.out / "manifest.json").unlink(missing_ok=True)
    forgotten = read_forgotten(task.out)
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
    with noting_other_text(task.caption_encoding) as noted:
        rows = _usable_rows(task, forgotten, skipped, examples, told, noted)
        first = next(rows, None)
        if first is None:
            drop_indexes(path)
            path.unlink(missing_ok=True)
        else:
            write_part(path, chain([first], rows))
    return {
        "rows_in": task.span.rows,
        "rows_out": task.span.rows - skipped.total(),
        "skipped": dict(sorted(skipped.items())),
        "examples": examples,
        "bytes": path.stat().st_size if first is not None else 0,
        "sha256": file_sha256(path) if first is not None else None,
        "index_sha256": file_sha256(index_path(path)) if first is not None else None,
        **told,
        **noted.report,
    }


def encoding_settings(caption_encoding: str) -> dict:
    """As part of the settings of a conversion."""
    return {"caption_encoding": caption_encoding} if caption_encoding != GUESSED_ENCODING else {}


def _usable_rows(
    task: PartTask, forgotten: Forgotten, skipped: Counter, examples: dict, told: Counter, noted: OtherText
) -> Iterator[Row]:
    """The rows that can be used, metadata filled in; the others go into `skipped` and `examples` by reason. Of those
    that can be used, `told` counts OTHER_PROFILES and ENCODED_ANEW, and `noted` what was not UTF-8."""
    for source_row in (task.copy() if task.copy else task.unit).read(task.span):
        try:
            loaded = source_row.load()
            row = _make_row(source_row.key, loaded, task)
            if row is None:
                skipped[BLOCKED] += 1
            elif forgotten.covers(row.meta, task.source):
                skipped[FORGOTTEN] += 1
            else:
                if has_other_profile(loaded.image):
                    told[OTHER_PROFILES] += 1
                if row.image is not loaded.image:
                    told[ENCODED_ANEW] += 1
                noted.end_row(repr(source_row.key))
                yield row
            noted.found.clear()
        except RowError as error:
            noted.found.clear()
            skipped[error.reason] += 1
            examples.setdefault(error.reason, [])
            if len(examples[error.reason]) < EXAMPLES_PER_REASON:
                examples[error.reason].append(f"{source_row.key!r}: {error}")


def _make_row(key: str, row: Row, task: PartTask) -> Row | None:
    """The row to write: what the source says of it, and over that what is known of these very bytes. None where the
    block list has its URL, or its file as it came, is, or would be written.

    Sizes are in pixels, after EXIF rotation. Raises RowError.
    """
    treatment = task.treatment
    if task.blocked.settings and _is_blocked(row, row.image, task.blocked):
        return None
    pixels = decode_pixels(row.image) if treatment.may_change_pixels else check_pixels(row.image)
    original = {"original_width": pixels.shape[1], "original_height": pixels.shape[0]}
    image, width, height = treat(row.image, pixels, treatment)
    if image is not row.image and _is_blocked(row, image, task.blocked):
        return None
    said = {_META_NAMES.get(name, name): value for name, value in row.meta.items() if name not in _DROPPED_META}
    if said.get("caption") == row.caption:
        del said["caption"]
    known = {
        "key": key.rpartition("/")[2],
        "sha256": hashlib.sha256(image).hexdigest(),
        "width": width,
        "height": height,
    }
    return Row(row.caption, image, original | said | known, control=_treat_control(row, pixels, treatment))


def _is_blocked(row: Row, image: bytes, blocked: BlockList) -> bool:
    urls = (row.meta.get(name) for name in ("url", "URL"))
    digest = hashlib.sha256(image).hexdigest() if blocked.hashes else None
    return any(blocked.names(url, digest, row.meta.get("sha256")) for url in urls)


def _treat_control(row: Row, pixels: np.ndarray, treatment: Treatment) -> bytes:
    """The second image, as small as the first and in its own encoding; empty where there is none. Raises RowError."""
    if not row.control:
        return b""
    second = decode_pixels(row.control)
    check_shape(second.shape[:2], pixels.shape[:2])
    return treat(row.control, second, Treatment(treatment.size, normalise=treatment.normalise))[0]
