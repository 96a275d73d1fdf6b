"""`format=folder`: a folder of pictures with captions, `0000.jpg` + `0000.txt` (+ `0000.json`), one base name a row.

This is what img2dataset calls `files`. A line of a filelist names a folder with all below it, each of which that holds
pictures is a part. The list of names is kept in the cache folder, one for each time of change of the folder, with an
index; contents are read from the folder.
"""

import json
from contextlib import contextmanager
from pathlib import Path

from ...utils.errors import OutputError, PartError, RowError
from ...utils.files import atomic_write, make_output_dir
from .base import IndexedRows, indexing, read_file, read_image_size, store_rows
from .folder_names import FolderNames, list_once, split_name
from .index.cache import IndexSpec, stat_part
from .index.entries import FILE_NAMES, Index
from .open_file import gone
from .row import Row
from .sample_files import IMAGE_SUFFIXES, assemble_row, image_places


class ImageFolder(IndexedRows):
    """The rows of a folder in the order of their base names; each of its subfolders is a part of its own."""

    spec = IndexSpec((FILE_NAMES,), copy_suffix=".files")

    def _build(self) -> tuple[Path, Index]:
        listing = self.spec.copy_path(self.path, stat_part(self.path, self.spec))
        samples, table, offset = list_samples(self.path, self._has_control), [], 0
        make_output_dir(listing.parent)
        with indexing(self.path, len(samples), "row") as bar, _writing(listing) as file:
            for names in samples:
                images = image_places([split_name(name, self._has_control)[1] for name in names])
                size = read_image_size(self.path / names[images[0]]) if len(images) == 1 else (0, 0)
                line = json.dumps(names) + "\n"
                file.write(line)
                table.append((offset, len(line), *size))
                offset += len(line)
                bar.update()
        return store_rows(listing, self.spec, table)

    def _decode(self, data: bytes, where: str) -> Row:
        try:
            return read_sample(self.path, json.loads(data), where, self._has_control)
        except RowError as error:
            if self.path.is_dir():
                raise
            raise gone(self.path) from error


def read_sample(folder: Path, names: list[str], where: str, has_control: bool = False) -> Row:
    """The row of a sample's files. Raises RowError "unreadable", and as `assemble_row`."""
    files = [(split_name(name, has_control)[1], read_file(folder, name, where)) for name in names]
    return assemble_row(split_name(names[0], has_control)[0], files, where, has_control=has_control)


@contextmanager
def _writing(listing: Path):
    try:
        with atomic_write(listing, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise OutputError(f"cannot write {listing}: {error.strerror}; free some space") from error


def list_samples(folder: Path, has_control: bool = False) -> FolderNames:
    """The names of the files of each sample, sorted by base name (`split_name`). Raises PartError for a folder that is
    missing or without images."""
    try:
        samples = list_once(folder, has_control)
    except OSError as error:
        raise PartError(f"cannot read the folder {folder} ({error.strerror}); correct the filelist") from error
    if not samples.has_images:
        raise PartError(
            f"no images ({', '.join(IMAGE_SUFFIXES)}) in the folder {folder} or below it; correct the filelist"
        )
    return samples
