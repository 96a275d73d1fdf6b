"""`ppldm repack`: rows of any format as part files in which each row is a gzip member of its own.

    OUT/parts/part-00000.gz, part-00000.gz.idx, ...    one for each part of the filelists, in their order
    OUT/0-NAME.filelist, ...                           one for each filelist NAME
    OUT/repacked.filelist.list                         these, with their weights; train with it
    OUT/manifest.json                                  written last: rows in = rows out + skipped, by reason
    OUT/.repack/                                       records by which the same command goes on

Captions and image bytes stay what they are; `width` and `height` of the metadata become the image's own. A part is
finished when its record fits the content of its source (`ppldm.utils.finished`).

`--format mds` writes MosaicML's shards in their place, in a folder for each part, OUT/parts/00000/shard.00000.mds, and
OUT/parts/index.json with all of them, for `StreamingDataset(local="OUT/parts")`. `mds.zstd` compresses them. With
`--latents VAE` rows hold what `ppldm precompute` has cached of them in place of pictures, as micro_diffusion has it:
`latents_256` and so on, a sample of the posterior times the VAE's scaling_factor, and `caption_latents`, both float16.

`--in-place` rewrites parts of ordinary gzip under their own names, one after the other, line by line; to every other
reader they are ordinary gzip still. Files of other formats are refused: they can hold what a part does not.
"""

import os
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated

import numpy as np

from ..data.cached.file import CachedFile, list_cached
from ..data.cached.key import EmbeddingsKey, LatentsKey
from ..data.filelist import write_filelist
from ..data.formats.base import indexing, is_gzip
from ..data.formats.csv_table import list_images
from ..data.formats.index import GZIP_MEMBERS, find_stored
from ..data.formats.layouts import CONTROL_LAYOUT, DEFAULT_LAYOUT, LAYOUTS, get_layout
from ..data.formats.mds import STATED, write_shards
from ..data.formats.part import (
    PackedRows,
    Part,
    drop_indexes,
    index_path,
    measure_lines,
    member_lines,
    packed_lines,
    write_lines,
    write_part,
)
from ..data.formats.row import BOM, EXAMPLES_PER_REASON, Row, Rows
from ..utils.errors import ConfigError, DataError, OutputError, PartError, RowError
from ..utils.files import atomic_dir, read_json_object, remove_leftovers, remove_path, write_json
from ..utils.finished import JobFolder, Piece, finish, list_pieces, make_key
from ..utils.log import get_logger, progress
from ..utils.processes.workers import check_workers, map_unordered
from ..utils.rng import Stream, make_rng
from ..utils.store.cache import address_of, in_store
from ..utils.text import print_report
from .parts import PartName, list_parts, open_rows

_SUFFIXES = {"mds": "", "mds.zstd": ".zstd"}  # of the shards' compression


def repack(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    out: str = "",  # folder for parts and filelists; made if missing
    in_place: bool = False,  # in place of --out: rewrite parts of ordinary gzip under their own names
    format: Annotated[str, {"choices": ["part", *_SUFFIXES]}, "what is written; MDS for MosaicML's streaming"] = "part",
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    num_workers: int = 0,  # processes; 0 means one per core, and one with --in-place. The output does not depend on it
    latents: str = "",  # with MDS: VAE whose cached latents, and embeddings, stand in place of pictures; its folder
    redo: bool = False,  # make parts again that were made of other filelists, or read in another way
    json: bool = False,  # print the manifest as JSON
):
    """Rewrite rows of any format as part files that are read at random at full speed.

    Train with --file_list OUT/repacked.filelist.list. Rows that cannot be read are left out
    and counted by reason; images are not decoded. Stopped at any
    point, the same command goes on; parts whose source has changed are made again.

    With --in-place all rows stay, and filelists stay as they are; each file is replaced when its successor is whole.
    Runs that were trained on a file go on after that with --accept_changes data.
    """
    if bool(out) == in_place:
        raise ConfigError("say where the parts go: --out DIR, or --in-place")
    if in_place and format != "part":
        raise ConfigError(f"only parts are rewritten in place; name --out DIR for --format {format}")
    if latents and format == "part":
        raise ConfigError("part files have latents beside them; name --format mds with --latents")
    parts = list_parts(filelists, layout)
    if in_place:
        manifest = repack_in_place(parts, check_workers(num_workers or 1))
    else:
        manifest = repack_parts(parts, Path(out), check_workers(num_workers), redo, format, latents)
    print_report(manifest, partial(_describe, out), json)


def _describe(out: str, manifest: dict) -> str:
    if not out:
        sizes = f"{manifest['bytes_before'] / 1e6:.3g} MB as {manifest['bytes_after'] / 1e6:.3g} MB"
        return f"{manifest['rewritten']} of {manifest['parts']} part(s) rewritten in place, {sizes}"
    text = f"{manifest['rows_out']} of {manifest['rows_in']} rows in {len(manifest['parts'])} part(s)"
    lines = [text, *(f"  skipped, {reason}: {count}" for reason, count in manifest["skipped"].items())]
    return "\n".join([*lines, f"for ppldm train: --file_list {Path(out, 'repacked.filelist.list')}"])


def repack_in_place(parts: list[PartName], num_workers: int) -> dict:
    """Rewrite parts of ordinary gzip under their own names; others stay. Returns how many, and their bytes. Raises
    ConfigError for files of other formats or at an address, OutputError, DataError."""
    for part in parts:
        if part.source.format != "part":
            raise ConfigError(
                f"{part.path} is of format={part.source.format}, and only parts of gzip are rewritten in place; "
                "name --out DIR"
            )
        if in_store(part.path):
            raise ConfigError(f"{address_of(part.path)} is at an address; name --out DIR in place of --in-place")
    parts = [*{part.path.resolve(): part for part in parts}.values()]
    report = Counter(parts=len(parts), rewritten=0, bytes_before=0, bytes_after=0)
    made = map_unordered(_repack_in_place, parts, num_workers)
    for _, found in progress(made, total=len(parts), desc="repack", unit="part"):
        report.update(found)
    return dict(report)


def _repack_in_place(part: PartName) -> dict:
    """In one pass and without a copy. Blank lines, which are not rows, go."""
    path, layout = part.path.resolve(), get_layout(part.source.layout)
    before, found = path.stat().st_size, find_stored(path, Part.spec)
    if not is_gzip(path) or (found and found[1].kind == GZIP_MEMBERS):
        return {}
    with indexing(path, before, "B") as bar:
        try:
            deque(measure_lines(member_lines, path, layout, bar), maxlen=0)
            return {}
        except PackedRows:
            lines = measure_lines(partial(packed_lines, lambda _: None), path, layout, bar)
            write_lines(path, ((line.removeprefix(BOM) if at == 0 else line, size) for (at, _, line), size in lines))
    if layout is not LAYOUTS[DEFAULT_LAYOUT]:  # the index has sizes of another column
        drop_indexes(path)
    return {"rewritten": 1, "bytes_before": before, "bytes_after": path.stat().st_size}


@dataclass(frozen=True)
class _Task:
    """`path`: a part file, or a folder of MDS shards."""

    part: PartName
    path: Path
    format: str
    scaling: float | None = None  # of latents in place of pictures

    def run(self) -> dict:
        """The record of the part, which is made unless it is finished."""
        source, path = self.part.source, self.part.path
        pieces = [*list_pieces(path)]
        if source.format == "csv":
            images = list_images(path, source.layout == CONTROL_LAYOUT)
            pieces += [Piece(image, image.name) for image in images]
        if source.idx_to_prompt:
            pieces.append(Piece(source.idx_to_prompt, "idx_to_prompt"))
        settings = {"path": os.path.abspath(path), "format": source.format, "layout": source.layout}
        settings |= {"written as": self.format} if self.format in _SUFFIXES else {}
        if self.scaling is not None:
            settings["latents times"] = self.scaling
            pieces += [Piece(file, file.name) for file in _cached_files(self.part)]
        record_path = self.path.parent.parent / ".repack" / f"{self.path.name}.json"
        key = make_key(settings, pieces, record_path)  # before the first row is read, so that a later change is seen
        return finish(record_path, key, self._is_whole, self._write)[0]

    def _is_whole(self, record: dict) -> bool:
        with suppress(PartError, OSError):
            if self.format in _SUFFIXES:
                parts, files = self.path.parent, map(_stored, record["shards"])
                return all((parts / one["basename"]).stat().st_size == one["bytes"] for one in files)
            summary = Part.summarize(self.path)
            return summary is not None and summary.rows == record["rows_out"]
        return False

    def _write(self) -> dict:
        for name in ("manifest.json", f"parts/{STATED}"):  # from here on they would lie
            Path(self.path.parent.parent, name).unlink(missing_ok=True)
        skipped, examples = Counter(), []
        with closing(open_rows(self.part)) as part:
            cached = None if self.scaling is None else _Cached(self.part, self.scaling)
            rows = _usable_rows(part, skipped, examples, cached)
            first = next(rows, None)
            if first is None:
                raise DataError(f"none of the {len(part)} rows of {part.path} can be used: {'; '.join(examples)}")
            rows, shards = chain([first], rows), {}
            if self.format in _SUFFIXES:
                with atomic_dir(self.path) as folder:
                    shards["shards"] = write_shards(folder, self.path.name, rows, _SUFFIXES[self.format])
            else:
                write_part(self.path, rows)
            skipped = dict(sorted(skipped.items()))
            return {"rows_in": len(part), "rows_out": len(part) - sum(skipped.values()), "skipped": skipped, **shards}

    def files(self, record: dict) -> list[str]:
        """What was written, for a filelist."""
        names = [_stored(shard)["basename"] for shard in record.get("shards", ())]
        return [f"parts/{name}" for name in names or [self.path.name]]


def _stored(shard: dict) -> dict:
    """Of what `index.json` says of a shard, what it says of its file."""
    return shard["zip_data"] or shard["raw_data"]


def _cached_files(part: PartName) -> list[Path]:
    """The caches of a part's latents and embeddings."""
    folder = part.source.latents_dir or part.path.parent
    return [file for key in (LatentsKey, EmbeddingsKey) for file in list_cached(folder, part.path.name, key.suffix)]


class _Cached:
    """The columns of rows that micro_diffusion's shards have, of what is cached of a part. Raises DataError."""

    def __init__(self, part: PartName, scaling: float):
        files = [CachedFile(path) for path in _cached_files(part)]
        self.path, self.scaling = part.path, scaling
        of_latents = [(file.key.shapes, file) for file in files if isinstance(file.key, LatentsKey)]
        squares = [(shapes[0][0], file) for shapes, file in of_latents if len(shapes) == 1 and len({*shapes[0]}) == 1]
        self.moments = dict(squares)
        self.captions = [file for file in files if isinstance(file.key, EmbeddingsKey)]
        made_by = {file.key.autoencoder for _, file in squares}
        if not squares or len(squares) > len(self.moments) or len(made_by) > 1 or len(self.captions) > 1:
            what = "cached latents or embeddings of several kinds" if squares else "no cached latents of squares"
            raise DataError(f"{part.path} has {what}; leave those of one kind, made by `ppldm precompute`")

    def columns(self, row: int) -> dict[str, bytes]:
        """Raises RowError."""
        found = {}
        for side, file in self.moments.items():
            mean, std = _present(file, row)
            rng = make_rng(side, Stream.POSTERIOR, file.key.part[1], row)  # of this content and size
            noise = rng.standard_normal(mean.shape, np.float32)
            found[f"latents_{side}"] = (mean + std * noise) * np.float32(self.scaling)
        for file in self.captions:
            found["caption_latents"] = _present(file, row)
        with np.errstate(over="ignore"):
            halves = {name: array.astype("<f2") for name, array in found.items()}
        if bad := [name for name, array in halves.items() if not np.isfinite(array).all()]:
            raise RowError("not_finite", f"{self.path} row {row}: {bad[0]} is beyond float16")
        return {name: array.tobytes() for name, array in halves.items()}


def _present(file: CachedFile, row: int) -> np.ndarray:
    array = file.read(row, 0)
    if array is None:
        raise RowError("latents", f"{file.path} row {row} is missing; {file.key.command} makes it")
    return array


def repack_parts(
    parts: list[PartName], out: Path, num_workers: int, redo: bool = False, format: str = "part", latents: str = ""
) -> dict:
    """Repack parts into the folder `out` and return the manifest. Raises ConfigError, OutputError, DataError."""
    scaling = _scaling_of(latents) if latents else None
    name = "{:05}" if format in _SUFFIXES else "part-{:05}.gz"
    tasks = [_Task(part, out / "parts" / name.format(number), format, scaling) for number, part in enumerate(parts)]
    known = {task.path.name for task in tasks} | {path.stem for path in (out / ".repack").glob("*.json")}
    if any(path.name not in known for path in _list_written(out)):
        raise OutputError(f"{out / 'parts'} holds files of another origin; choose another --out, or delete that folder")
    if any(Path(os.path.abspath(task.part.path)).is_relative_to(os.path.abspath(out / "parts")) for task in tasks):
        raise ConfigError(f"--out {out} holds the parts that are to be read; choose another")
    lists = {part.source.path: part.source for part in parts}
    ways = {os.path.relpath(path, out): [source.format, source.layout] for path, source in lists.items()}
    plan = {"filelists": list(ways), "formats and layouts": list(ways.values())}
    plan |= {"written as": format} if format in _SUFFIXES else {}
    plan |= {"latents times": scaling} if latents else {}

    def clear() -> None:
        for path in (
            out / "manifest.json",
            out / "parts" / STATED,
            *out.glob("*.filelist"),
            *out.glob("*.filelist.list"),
        ):
            path.unlink(missing_ok=True)

    with JobFolder(out, ".repack", "repack", "parts").claimed(plan, redo, clear=clear):
        remove_leftovers(out / "parts")
        made = map_unordered(_Task.run, tasks, num_workers)
        records = dict(progress(made, total=len(tasks), desc="repack", unit="part"))
        skipped = sum((Counter(record["skipped"]) for record in records.values()), Counter())
        # Those of an earlier, longer state of the same filelists.
        for path in sorted({*_list_written(out)} - {task.path for task in tasks}):
            get_logger().info("removing %s: the filelists have fewer parts than before", path)
            for one in (out / "manifest.json", out / ".repack" / f"{path.name}.json", path, index_path(path)):
                remove_path(one)
        manifest = {
            **{name: sum(record[name] for record in records.values()) for name in ("rows_in", "rows_out")},
            "skipped": dict(sorted(skipped.items())),
            "parts": [
                {"path": f"parts/{task.path.name}", "source": str(task.part.path), "rows": records[task]["rows_out"]}
                for task in tasks
            ],
        }
        lines: list[str] = []
        weighted = all(task.part.source.weight is not None for task in tasks)
        if not weighted and any(task.part.source.weight is not None for task in tasks):
            get_logger().warning("some filelists come with weights and others without; the new list has none")
        for number, (source, own) in enumerate(groupby(tasks, key=lambda task: task.part.source)):
            name = f"{number}-{source.path.name.removesuffix('.filelist')}.filelist"
            write_filelist(out / name, [file for task in own for file in task.files(records[task])])
            line = name + (f" {source.weight:g}" if weighted else "") + (" format=mds" if format in _SUFFIXES else "")
            lines.append(line + (f" layout={CONTROL_LAYOUT}" if source.layout == CONTROL_LAYOUT else ""))
        if format in _SUFFIXES:
            shards = [shard for task in tasks for shard in records[task]["shards"]]
            write_json(out / "parts" / STATED, {"shards": shards, "version": 2})
        write_filelist(out / "repacked.filelist.list", lines)
        write_json(out / "manifest.json", manifest)
        return manifest


def _list_written(out: Path) -> list[Path]:
    """The parts and folders of shards that are there."""
    return [*(out / "parts").glob("*.gz"), *(path for path in (out / "parts").glob("[0-9]*") if path.is_dir())]


def _scaling_of(vae: str) -> float:
    """The one number by which latents of a VAE are scaled, diffusers' where its config.json names none. Raises
    ConfigError."""
    folder = Path(vae).expanduser()
    places = [one / "config.json" for one in (folder, folder / "vae", folder / "vqvae")]
    config = read_json_object(next(filter(Path.is_file, places), places[0]), ConfigError, "--latents names a VAE")
    if config.get("shift_factor") or config.get("latents_mean"):
        raise ConfigError(f"--latents {vae}: shards hold latents that are only scaled, and this VAE's are shifted too")
    return float(config.get("scaling_factor", 0.18215))


def _usable_rows(part: Rows, skipped: Counter, examples: list[str], cached: _Cached | None = None) -> Iterator[Row]:
    for number in range(len(part)):
        try:
            row = part.read(number)
            columns = cached.columns(number) if cached else {}
        except RowError as error:
            skipped[error.reason] += 1
            if len(examples) < EXAMPLES_PER_REASON:
                examples.append(str(error))
            continue
        if cached:
            row = replace(row, image=b"", control=b"", meta=row.meta | columns)
        elif not row.image:
            skipped["no_image"] += 1
            examples[:] = examples or [f"{part.path} row {number} has no picture here, but latents"]
            continue
        width, height = int(part.widths[number]), int(part.heights[number])
        known = {"width": width, "height": height} if 0 < width < 65535 and 0 < height < 65535 else {}
        yield replace(row, meta=row.meta | known)
