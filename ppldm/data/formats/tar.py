"""`format=webdataset`: tars of samples, as WebDataset and img2dataset write them.

Files that follow one another and share a base name (all before the first dot of the file's name) are one sample, as in
`formats.folder`. A suffix that comes a second time starts a new sample. Folders, hidden files and names between double
underscores are not samples. A sample is read with its headers, so that what is not a whole one of one base name is a
bad row, never a picture under the caption of another.
"""

import io
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from unicodedata import normalize

from ...utils.checksums import checksum_json
from ...utils.errors import ConfigError, PartError, RowError
from ...utils.files import read_json_object
from ...utils.log import get_logger
from ..images import image_size
from .base import MAX_ROW_BYTES, ROWS_TO_TRY, IndexedRows, indexing, is_gzip, store_rows
from .folder import ALL_SUFFIXES, IMAGE_SUFFIXES, assemble_row, image_places
from .index import TAR_SAMPLES, Index, IndexSpec
from .layouts import DEFAULT_LAYOUT
from .row import Row

_BLOCK = 512
_BASE_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_HIDDEN = re.compile(r"__[^/]*__([./]|$)")
# What tarfile raises on damaged headers, which is more than the error that it documents.
_DAMAGED = (tarfile.TarError, ValueError, OverflowError, IndexError, KeyError, EOFError)


class TarShard(IndexedRows):
    """A tar of samples. idx_to_prompt: a JSON file {class number: caption} for shards with `.cls`, or None."""

    spec = IndexSpec((TAR_SAMPLES,))

    def __init__(self, path, idx_to_prompt=None, layout: str = DEFAULT_LAYOUT):
        self._prompts = read_class_prompts(str(idx_to_prompt)) if idx_to_prompt else None
        super().__init__(path, layout)
        if self._prompts is not None:  # which change the captions
            self.identity += (checksum_json(self._prompts),)

    def _build(self) -> tuple[Path, Index]:
        if is_gzip(self.path):
            raise PartError(
                f"{self.path} is compressed, so that its rows cannot be read at random; unpack it with gzip -d"
            )
        with open(self.path, "rb") as file, indexing(self.path, self.path.stat().st_size, "B") as bar:
            table = []
            for start, stop, images in _samples(file, self.path):
                if stop - start > MAX_ROW_BYTES:
                    raise PartError(f"{self.path} row {len(table)} is over {MAX_ROW_BYTES} bytes long; omit it")
                size = (0, 0)
                if len(images) == 1:
                    file.seek(images[0][0])
                    size = image_size(file.read(images[0][1]))
                table.append((start, stop - start, *size))
                bar.update(stop - bar.n)
        if table and not any(height for *_, height in table[:ROWS_TO_TRY]):
            raise PartError(
                f"{self.path} is a tar, but none of its first samples has an image ({', '.join(IMAGE_SUFFIXES)}); "
                "correct the filelist"
            )
        return store_rows(self.path, self.spec, table)

    def _decode(self, data: bytes, where: str) -> Row:
        files, keys = {}, set()
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                for info, key, suffix in _members(tar):
                    keys.add(key)
                    if suffix in ALL_SUFFIXES:
                        files[suffix] = tar.extractfile(info).read()
                whole = tar.offset == len(data)
        except _DAMAGED as error:
            raise RowError("tar", f"{where}: damaged tar data ({error}); get the tar again") from error
        if not whole or len(keys) != 1:
            raise RowError("tar", f"{where}: the tar has changed since it was indexed, or is damaged; get it again")
        return assemble_row(keys.pop(), [*files.items()], where, self._prompts, self._has_control)


@lru_cache(maxsize=16)
def read_class_prompts(path: str) -> dict[str, str]:
    """The captions of classes by number, from a JSON object. Raises ConfigError."""
    remedy = 'idx_to_prompt= names a JSON file of captions by class, such as {"0": "tench"}'
    table = read_json_object(path, ConfigError, remedy)
    if not all(isinstance(prompt, str) for prompt in table.values()):
        raise ConfigError(f"{path} holds a caption that is not text; {remedy}")
    return table


def _samples(file, path: Path) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """(start, end, [(start, length) of an image]) in bytes of each sample. Raises PartError."""
    with _open_tar(file, path) as tar:
        for _, files in _grouped(tar):
            infos = [*files.values()]
            images = [infos[place] for place in image_places([*files])]
            end = infos[-1].offset_data + -(-infos[-1].size // _BLOCK) * _BLOCK
            yield infos[0].offset, end, [(image.offset_data, image.size) for image in images]
        end = tar.offset
    # tarfile stops in silence at a header that it cannot read: after the last member there must be but zeros.
    file.seek(end)
    rest = file.read(_BLOCK)
    if not rest:
        get_logger().warning("%s has no end mark; if its writer was stopped, rows after the last are missing", path)
    while rest:
        if rest.strip(b"\0"):
            raise PartError(f"{path} is damaged after byte {end}, its last readable header; get it again")
        rest = file.read(1 << 20)


def scan_samples(file, path: Path) -> Iterator[tuple[int, int]]:
    """(start, end) in bytes of each sample. Raises PartError where the tar is damaged, after what could be read."""
    return ((start, stop) for start, stop, _ in _samples(file, path))


def read_samples(file, path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(base name, content by suffix) of the samples from where the file stands. Raises PartError."""
    with _open_tar(file, path) as tar:
        for key, files in _grouped(tar):
            yield key, {suffix: tar.extractfile(files[suffix]).read() for suffix in files if suffix in ALL_SUFFIXES}


@contextmanager
def _open_tar(file, path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            yield tar
    except _DAMAGED as error:
        raise PartError(f"{path} is not a tar, or is damaged or truncated ({error}); get it again") from error


def _grouped(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """(base name, files by suffix) of each sample."""
    key, files = None, {}
    for info, base, suffix in _members(tar):
        if base != key or suffix in files:
            if files:
                yield key, files
            key, files = base, {}
        files[suffix] = info
        tar.members = []  # which would hold all names of the tar
    if files:
        yield key, files


def _members(tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """(member, base name, suffix in lower case) of all files that belong to samples."""
    position = -1
    for info in tar:
        if info.offset <= position or info.size < 0:  # a negative length in a damaged header leads back
            raise tarfile.ReadError("a header leads backwards")
        position = info.offset
        name = _BASE_NAME.fullmatch(info.name)
        if info.isreg() and name and not _HIDDEN.match(info.name):
            yield info, normalize("NFC", name[1]), name[2].lower()
