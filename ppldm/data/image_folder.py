"""`format=folder`: a folder of pictures with captions, `0000.jpg` + `0000.txt` (+ `0000.json`), one base name a row.

This is what img2dataset calls `files`; each of its numbered folders is a line of a filelist. The list of names is kept
in the cache folder, one for each time of change of the folder, with an index; contents are read from the folder.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ..utils.errors import OutputError, PartError
from ..utils.files import make_output_dir, write_text
from .index import FILE_NAMES, Index
from .indexed import IndexedRows, indexing, read_file, read_image_size, store_rows
from .row import Row
from .sample import IMAGE_SUFFIXES, SUFFIXES, assemble_row
from .stored import Way, stat_part


class ImageFolder(IndexedRows):
    """The rows of a folder in the order of their base names. Subfolders are not searched."""

    way = Way((FILE_NAMES,), copy_suffix=".names")

    def _build(self) -> tuple[Path, Index]:
        listing = self.way.copy_path(self.path, stat_part(self.path))
        lines, table, offset = [], [], 0
        samples = list(list_samples(self.path))
        with indexing(self.path, len(samples), "row") as bar:
            for names in samples:
                images = [name for name in names if _suffix(name) in IMAGE_SUFFIXES]
                size = read_image_size(self.path / images[0]) if len(images) == 1 else (0, 0)
                lines.append(json.dumps(names) + "\n")
                table.append((offset, len(lines[-1]), *size))
                offset += len(lines[-1])
                bar.update()
        make_output_dir(listing.parent)
        try:
            write_text(listing, "".join(lines))
        except OSError as error:
            raise OutputError(f"cannot write {listing}: {error.strerror}; free some space") from error
        return listing, store_rows(listing, self.way, table)

    def _decode(self, data: bytes, where: str) -> Row:
        names = json.loads(data)
        files = {_suffix(name): read_file(self.path / name, where) for name in names}
        return assemble_row(Path(names[0]).stem, files, where)


def list_samples(folder: Path) -> Iterator[list[str]]:
    """The names of the files of each sample, sorted by base name (all before the last dot; suffixes in either case).

    Hidden files, subfolders and other suffixes are no part of the format; a `.json` alone is no sample. Raises
    PartError for a folder that is missing or without images.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file() and not entry.name.startswith("."))
    except OSError as error:
        raise PartError(f"cannot read the folder {folder} ({error.strerror}); correct the filelist") from error
    samples = defaultdict(list)
    for name in names:
        if _suffix(name) in SUFFIXES:
            samples[Path(name).stem].append(name)
    suffixes = {key: {_suffix(name) for name in own} for key, own in samples.items()}
    if not any(own.intersection(IMAGE_SUFFIXES) for own in suffixes.values()):
        raise PartError(
            f"no images ({', '.join(IMAGE_SUFFIXES)}) in the folder {folder}; subfolders are not searched: give each a "
            "line of the filelist"
        )
    yield from (samples[key] for key in sorted(samples) if suffixes[key] != {"json"})


def _suffix(name: str) -> str:
    return Path(name).suffix[1:].lower()
