"""`ppldm convert`: source rows become part files, a filelist and a manifest.

Laws. Rows in = rows out + rows skipped, by reason. Pictures pass through untouched unless a treatment is asked for;
each is decoded once, as training will, as the check. The units of the source (`convert.units`) are cut into spans of
rows_per_part rows, and a part is a function of only its span: the output is the same to the byte for any number of
processes or machines and after any interruption. A part is finished when its record fits both the input and the part
(`ppldm.utils.finished`). On Spark, source and OUT may be addresses (`part_task`).

    OUT/parts/part-00000.gz, part-00000.gz.idx, ...
    OUT/NAME.filelist, OUT/NAME.filelist.list     relative names inside, so that OUT can be moved
    OUT/manifest.json                             written last
    OUT/forgotten.json                            what `ppldm forget` took out; such rows are never put in again
    OUT/.convert/                                 what the same command needs to go on; may be deleted when done
"""

import os
from collections import Counter
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated

from ...data.filelist import write_filelist
from ...data.formats.csv_table import IMAGEFOLDER_TABLES, warn_of_unnamed
from ...data.formats.layouts import CONTROL_LAYOUT, DEFAULT_LAYOUT
from ...data.formats.row import (
    EXAMPLES_PER_REASON,
    GUESSED_ENCODING,
    describe_other_text,
    merge_other_text,
    noting_other_text,
)
from ...utils.errors import ConfigError, DataError
from ...utils.files import as_path, local_path, remove_path, write_json
from ...utils.finished import JobFolder, find_finished
from ...utils.log import get_logger, progress
from ...utils.machine.spark import DRIVER_MEMORY_GB, is_submitted, spark_session_if
from ...utils.processes.workers import check_workers, map_unordered
from ...utils.text import count_of, print_report
from ..block_list import BLOCKED, NOTHING, BlockList, BlockLists, read_block_list
from ..place import AddressPath, is_address, is_remote, path_of
from ..provenance.forgotten import FORGOTTEN, PACKED
from . import part_task
from .part_task import ENCODED_ANEW, OTHER_PROFILES, PartTask, encoding_settings
from .reencode import Treatment
from .units import NOT_DOWNLOADED, PackedUnit, Span, Unit, find_units, pack

MAX_BAD_FRACTION = 0.5
_MANY_SMALL_PARTS = 4  # so many times more parts than packed folders make deserve a word


def convert(
    folder: str,  # pictures with captions beside them, in a table or in their names; img2dataset's output; or a file
    out: Annotated[str, {"opt": True, "required": True}],  # folder for parts, filelists and manifest; made if missing
    name: str = "custom",  # names the filelists: OUT/NAME.filelist and OUT/NAME.filelist.list
    rows_per_part: int = 1000,  # rows of the input in one part file
    pack_folders: bool = False,  # fill parts with rows of several folders; else each folder makes parts of its own
    idx_to_prompt: str = "",  # JSON file of captions by class, {"0": "tench"}: for .cls of tars, and folders by class
    image_col: str = "",  # of a table, JSON lines or MDS: column of the pictures; by default image, file_name, ...
    caption_col: str = "",  # the same of the captions; by default text, caption, ...
    layout: str = DEFAULT_LAYOUT,  # control: each row has a second image too, 0000.control.png (docs/controlnet.md)
    size: int = 0,  # shrink pictures with a longer short side to it, in pixels (JPEG at quality 95); 0: none
    quality: int = 0,  # encode JPEG and WebP anew at this quality, 1 to 100; 0 leaves them as they are
    format: str = "",  # encode what is of another format as jpg, png or webp; default: leave it
    min_size: int = 0,  # skip pictures whose short side is shorter, in pixels
    normalise: bool = False,  # encode anew what is rotated by EXIF or transparent, for readers that ignore both
    interpolation: str = "lanczos",  # filter by which --size shrinks: lanczos or bicubic
    block_list: BlockLists = None,  # files of URLs and sha256:HEX; such rows are left out
    caption_encoding: str = GUESSED_ENCODING,  # what captions are that are not UTF-8: latin-1, cp1252, shift_jis …
    num_workers: int = 0,  # processes; 0 means one per core. The output does not depend on it
    master: str = None,  # a Spark cluster, such as spark://host:7077, whose nodes share the folders; takes addresses
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
    treatment = Treatment(size, quality, format, min_size, normalise, interpolation)
    asked = name, rows_per_part, treatment, num_workers, master, pack_folders, redo, layout
    asked += read_block_list(block_list), caption_encoding, idx_to_prompt, image_col, caption_col
    addresses = [name for name in (folder, out) if is_address(name)]
    on_spark = bool(master) or is_submitted()
    if not on_spark and (remote := next(filter(is_remote, addresses), None)):
        raise ConfigError(f"{remote} is an address, which needs Spark; add --master, local[2] being this machine")
    with spark_session_if(on_spark and bool(addresses), master, DRIVER_MEMORY_GB) as spark:
        conversion = Conversion(path_of(folder, spark), path_of(out, spark), *asked)
        if dry_run:
            print_report(conversion.plan(), _describe_plan, json)
            return
        advice = f"\nfor ppldm train: --file_list {conversion.out / name}.filelist.list"
        print_report(conversion.run(), lambda manifest: describe(manifest) + advice, json)


convert.aliases = {"--normalize": "--normalise", "--class-mapping": "--idx-to-prompt"}
convert.aliases |= {"--image-key": "--image-col", "--caption-key": "--caption-col"}


def convert_source(source, out, name: str = "custom", **settings) -> dict:
    """`Conversion.run` of these arguments."""
    return Conversion(as_path(source), as_path(out), name, **settings).run()


def check_conversion(folder, out, block_list=None, **flags) -> None:
    """Find what `convert`, whose arguments these are, would refuse before it looks at the source. Raises PpldmError."""
    treatment = Treatment(**{one.name: flags.pop(one.name) for one in fields(Treatment) if one.name in flags})
    blocked = read_block_list(block_list)
    conversion = Conversion(Path(folder), Path(out), treatment=treatment, blocked=blocked, **flags)
    conversion.job.check(conversion.settings, conversion.redo)


@dataclass(frozen=True)
class Conversion:
    """A source, the folder that its parts go to, and how. Raises ConfigError for what cannot be."""

    source: Path | AddressPath
    out: Path | AddressPath
    name: str = "custom"
    rows_per_part: int = 1000
    treatment: Treatment = Treatment()
    num_workers: int = 0
    master: str | None = None
    pack_folders: bool = False
    redo: bool = False
    layout: str = DEFAULT_LAYOUT
    blocked: BlockList = NOTHING
    caption_encoding: str = GUESSED_ENCODING
    idx_to_prompt: str = ""
    image_col: str = ""
    caption_col: str = ""

    def __post_init__(self):
        if not self.name or Path(self.name).name != self.name:
            raise ConfigError(f"--name {self.name!r} cannot name a file; use a plain word such as 'custom'")
        if self.rows_per_part < 1:
            raise ConfigError(f"--rows-per-part is {self.rows_per_part}; it must be at least 1")
        if self.layout not in (DEFAULT_LAYOUT, CONTROL_LAYOUT):
            raise ConfigError(f"--layout {self.layout} cannot be written; choose {DEFAULT_LAYOUT} or {CONTROL_LAYOUT}")
        try:
            "a".encode(self.caption_encoding)
        except LookupError as error:
            what = f"{self.caption_encoding} is not known ({error})"
            raise ConfigError(f"--caption-encoding {what}; write one such as latin-1") from error
        if self.pack_folders and isinstance(self.source, AddressPath):
            raise ConfigError("--pack-folders packs folders of pictures, which are not read at an address; omit it")
        check_workers(self.num_workers)

    @property
    def job(self) -> JobFolder:
        return JobFolder(self.out, ".convert", "conversion", "parts")

    @property
    def settings(self) -> dict:
        """What the folder is claimed with. The source is relative to `out`, so that both can be moved together."""
        is_local = not any(isinstance(path, AddressPath) for path in (self.source, self.out))
        source = os.path.relpath(self.source, self.out) if is_local else str(self.source.absolute())
        settings = {"source": source, "name": self.name, "rows_per_part": self.rows_per_part}
        settings |= {option: value for option, value in self.treatment.settings().items() if value}
        settings |= {"pack_folders": True} if self.pack_folders else {}
        settings |= {"captions": "by class"} if self.idx_to_prompt else {}
        settings |= {"layout": self.layout} if self.layout != DEFAULT_LAYOUT else {}
        settings |= {name: value for name in ("image_col", "caption_col") if (value := getattr(self, name))}
        return settings | self.blocked.settings | encoding_settings(self.caption_encoding)

    def _check(self) -> None:
        """A source that is not there is told before what else may be in `out`."""
        if isinstance(self.source, Path) and not self.source.exists():
            self._make_tasks()
        self.job.check(self.settings, self.redo)

    def plan(self) -> dict:
        """{rows_in, parts, parts_finished}; nothing is written. Raises as `run`."""
        self._check()
        tasks = self._make_tasks()
        found = [find_finished(one.record_path, one.key(), partial(part_task.is_whole, one)) for one in tasks]
        rows, finished = sum(task.span.rows for task in tasks), len(tasks) - found.count(None)
        return {"rows_in": rows, "parts": len(tasks), "parts_finished": finished}

    def run(self) -> dict:
        """Convert, and return the manifest. Raises ConfigError, OutputError, DataError as `refuse_bad_source`."""
        self._check()
        tasks, out, name = self._make_tasks(), self.out, self.name
        earlier = (self.job.plan or {}).get("name", name)

        def clear() -> None:
            for left in ("manifest.json", f"{earlier}.filelist", f"{earlier}.filelist.list"):
                (out / left).unlink(missing_ok=True)

        with self.job.claimed(self.settings, self.redo, clear=clear):
            records = self._make_parts(tasks)
            _sweep(out, {task.path.name for task in tasks})
            manifest = merge_records(records, [task.source for task in tasks], name, self.rows_per_part)
            refuse_bad_source(manifest, self.source)
            write_filelist(out / f"{name}.filelist", [part["path"] for part in manifest["parts"]])
            line = f"{name}.filelist" if self.layout == DEFAULT_LAYOUT else f"{name}.filelist layout={self.layout}"
            write_filelist(out / f"{name}.filelist.list", [line])
            write_json(out / "manifest.json", manifest)
        return manifest

    def _make_tasks(self) -> list[PartTask]:
        classes = local_path(self.idx_to_prompt).absolute() if self.idx_to_prompt else None
        columns = self.image_col, self.caption_col
        units = find_units(self.source, self.layout == CONTROL_LAYOUT, classes, columns)
        at_address = isinstance(self.source, AddressPath)
        if at_address:
            counted = part_task.count_on_spark(units, self.rows_per_part, self.master)
        else:
            count = partial(_spans_of, rows=self.rows_per_part, caption_encoding=self.caption_encoding)
            counted = map_unordered(count, units, check_workers(self.num_workers))
        # Spark has a bar of its own.
        bar = progress(counted, total=len(units), desc="counting rows", unit="unit", delay=3, disable=at_address)
        spans = dict(bar)
        cut = [(unit, span) for unit in units for span in spans[unit]]
        if not cut:
            raise DataError(f"{self.source} holds no rows; name another source")
        packed = cut if at_address else pack(cut, self.source, self.rows_per_part)
        if self.pack_folders:
            cut = packed
        elif len(packed) * _MANY_SMALL_PARTS < len(cut):
            get_logger().warning("%d folders make %d parts; --pack-folders makes %d", len(units), len(cut), len(packed))
        paths = (self.out / "parts" / f"part-{number:05}.gz" for number in range(len(cut)))
        more = self.treatment, None, self.blocked, self.caption_encoding
        return [
            PartTask(path, _name_source(unit, self.source), unit, span, *more)
            for path, (unit, span) in zip(paths, cut, strict=True)
        ]

    def _make_parts(self, tasks: list[PartTask]) -> list[dict]:
        """The records of all parts, in their order."""
        records, on_spark = {}, bool(self.master) or is_submitted()  # which has a bar of its own
        if on_spark:
            made = part_task.make_on_spark(tasks, self.master)
        else:
            made = map_unordered(part_task.make_part, tasks, check_workers(self.num_workers))
        with progress(total=sum(task.span.rows for task in tasks), desc="convert", unit="row", disable=on_spark) as bar:
            for task, record in made:
                records[task.path.name] = record
                bar.update(task.span.rows)
        kept = sum(record.pop("kept") for record in records.values())
        if kept:
            get_logger().info("%d of %d parts were finished already", kept, len(tasks))
        return [records[task.path.name] for task in tasks]


def _describe_plan(plan: dict) -> str:
    parts = f"{count_of(plan['parts'], 'part')}, {plan['parts_finished']} of them finished"
    return f"{count_of(plan['rows_in'], 'row')}, {parts}; nothing was written"


def merge_records(records: list[dict], sources: list[str], name: str, rows_per_part: int) -> dict:
    """The manifest of parts, whose records and sources are in their order."""
    skipped, examples, parts = Counter(), {}, []
    for number, (record, source) in enumerate(zip(records, sources, strict=True)):
        skipped.update(record["skipped"])
        for reason, texts in record["examples"].items():
            examples[reason] = (examples.get(reason, []) + texts)[:EXAMPLES_PER_REASON]
        if record["rows_out"]:
            path = f"parts/part-{number:05}.gz"
            facts = {"rows": record["rows_out"], "bytes": record["bytes"], "sha256": record["sha256"]}
            parts.append({"path": path, **facts, "source": source})
    told = {what: sum(record.get(what, 0) for record in records) for what in (OTHER_PROFILES, ENCODED_ANEW)}
    return {
        "name": name,
        "rows_per_part": rows_per_part,
        "rows_in": sum(record["rows_in"] for record in records),
        "rows_out": sum(record["rows_out"] for record in records),
        "skipped": dict(sorted(skipped.items())),
        "examples": dict(sorted(examples.items())),
        **{what: count for what, count in told.items() if count},
        **merge_other_text(records),
        "parts": parts,
    }


def refuse_bad_source(manifest: dict, source) -> None:
    """Raises DataError where more than MAX_BAD_FRACTION of the rows cannot be used."""
    unasked = FORGOTTEN, BLOCKED, NOT_DOWNLOADED
    bad = {reason: count for reason, count in manifest["skipped"].items() if reason not in unasked}
    num_bad, num_rows = sum(bad.values()), sum(bad.values()) + manifest["rows_out"]
    if num_bad > MAX_BAD_FRACTION * num_rows:
        examples = manifest["examples"]
        reasons = "; ".join(f"{reason} {count}, for example {examples[reason][0]}" for reason, count in bad.items())
        raise DataError(
            f"{num_bad} of {num_rows} rows of {source} cannot be used: {reasons}; mend the source, then run the same "
            "command again"
        )


def describe(manifest: dict) -> str:
    """A manifest in one line, and one line more for each reason to skip rows."""
    size = f"{len(manifest['parts'])} part(s), {sum(part['bytes'] for part in manifest['parts']) / 1e6:.3g} MB"
    lines = [f"{manifest['rows_out']} of {manifest['rows_in']} rows in {size}"]
    for reason, count in manifest["skipped"].items():
        example = manifest["examples"].get(reason)
        lines.append(f"  skipped, {reason}: {count}" + (f", for example {example[0]}" if example else ""))
    told = {OTHER_PROFILES: "colour profile other than sRGB, ignored", ENCODED_ANEW: "made smaller or encoded anew"}
    lines += [f"  {told[what]}: {count_of(manifest[what], 'picture')}" for what in told if manifest.get(what)]
    return "\n".join(lines + describe_other_text(manifest, "say which it is, as --caption-encoding latin-1 --redo"))


def _name_source(unit: Unit, source) -> str:
    if isinstance(unit.path, AddressPath):
        return str(unit.path)[len(str(source)) + 1 :] or "."
    if isinstance(unit, PackedUnit):
        return PACKED
    return os.path.relpath(unit.path, source) if unit.path.is_relative_to(source) else "."  # a table of the cache


def _spans_of(unit: Unit, rows: int, caption_encoding: str) -> list[Span]:
    with noting_other_text(caption_encoding):
        spans = unit.spans(rows)
        if unit.path.name in IMAGEFOLDER_TABLES:
            warn_of_unnamed(unit.path, (piece.path for span in spans for piece in unit.input_pieces(span)))
        return spans


def _sweep(out: Path | AddressPath, parts: set[str]) -> None:
    """Remove what a killed run left half written, and parts of an earlier, longer state of the same source."""
    leftovers = [path for folder in (out, out / "parts", out / ".convert") for path in folder.glob(".*.tmp")]
    for part in sorted((out / "parts").glob("part-*.gz")):
        if part.name not in parts:
            get_logger().info("removing %s: the source has fewer rows than before", part)
            leftovers += [out / "manifest.json", out / ".convert" / f"{part.name}.json", *part_task.files_of(part)]
    for path in leftovers:
        remove_path(path)
