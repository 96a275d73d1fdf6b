"""Where rows come from: what a path holds, as units (`convert.units`) that are each read on their own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ...data.formats.csv_table import IMAGEFOLDER_TABLES
from ...data.formats.folder_names import entries_of, split_name
from ...data.formats.mds.packed import unpacked_name
from ...data.formats.sample_files import IMAGE_SUFFIXES, PICTURE_SUFFIXES
from ...data.text.survey import has_captions_beside, write_table
from ...utils.errors import ConfigError, DataError
from ...utils.files import as_path
from ...utils.log import get_logger
from ..place import AddressPath, natural_key
from .units import CsvUnit, FolderUnit, JsonLinesUnit, MdsUnit, ParquetUnit, TarUnit, Unit

_FILE_KINDS: dict[str, type[Unit]] = {
    ".tar": TarUnit,
    ".parquet": ParquetUnit,
    ".mds": MdsUnit,
    ".csv": CsvUnit,
    ".jsonl": JsonLinesUnit,
    ".ndjson": JsonLinesUnit,
}
# Whose pictures are files of their own.
_NAMING_KINDS = (".csv", ".jsonl", ".ndjson")


def find_units(path, has_control: bool = False) -> list[Unit]:
    """What a path holds, by its content, units sorted by the numbers in their names. has_control: as units have it.

    A file: a tar, a parquet file, a shard of MDS, a CSV file, JSON lines. A folder: with metadata.jsonl or
    metadata.csv, the table of a Hugging Face imagefolder; else its pictures, one unit, or its tars (img2dataset writes
    parquet files beside them), and what each of its folders holds; where none of this is there, files of the other
    kinds. Where it holds pictures alone, without captions in files beside them: the table that `write_table` makes of
    another table, or of the pictures' names. Raises ConfigError, and DataError where nothing of this kind is there.

    At an address, tars and parquet files are found by the same rule, and what else a folder is made of is refused.
    """
    path = as_path(path)
    if isinstance(path, Path) and path.is_file():
        if _suffix(path.name) not in _FILE_KINDS:
            raise ConfigError(f"{path} is not a known source; name a folder, or a file {', '.join(_FILE_KINDS)}")
        return [_unit_of_file(path, has_control)]
    passed: list[tuple[Path, list[str]]] = []
    units = list(_units_of_folder(path, passed)) if isinstance(path, Path) else _units_at(path)
    folders = [unit.path for unit in units if isinstance(unit, FolderUnit)]
    if not has_control and len(units) == len(folders) > 0 and not has_captions_beside(folders):
        return [CsvUnit(write_table(path))]
    for folder, names in passed:
        get_logger().warning(
            "%s: %d files such as %s are not read beside pictures, tars or folders; name them to read them",
            folder, len(names), names[0],
        )  # fmt: skip
    units = [replace(unit, has_control=has_control) for unit in units]
    if not units:
        raise DataError(
            f"no images in {path}; it should hold files {', '.join(IMAGE_SUFFIXES)}, each with a caption in a .txt of "
            f"the same base name, folders of them, or files {', '.join(_FILE_KINDS)}"
        )
    return units


def _units_of_folder(folder: Path, passed: list[tuple[Path, list[str]]]) -> Iterator[Unit]:
    """passed: is added the folders with files that are not read, and their names."""
    files, folders, has_images = [], [], False
    try:
        for name, is_folder in entries_of(folder):
            if is_folder:
                folders.append(name)
            elif _suffix(name) in _FILE_KINDS:
                files.append(name)
            else:
                has_images |= split_name(name)[1] in PICTURE_SUFFIXES
    except OSError as error:
        raise ConfigError(
            f"cannot read the folder {folder} ({error.strerror}); name one that holds 0000.jpg + 0000.txt, ..."
        ) from error
    files, folders = sorted(sorted(files), key=natural_key), sorted(sorted(folders), key=natural_key)
    if tables := [name for name in files if name in IMAGEFOLDER_TABLES]:
        yield _unit_of_file(folder / tables[0])  # which may name pictures of subfolders
        return
    tars = [name for name in files if _suffix(name) == ".tar"]
    own: list[Unit] = [FolderUnit(folder)] if has_images else [_unit_of_file(folder / name) for name in tars]
    own += [unit for name in folders for unit in _units_of_folder(folder / name, passed)]
    yield from own or (_unit_of_file(folder / name) for name in files)
    read = [] if has_images else tars
    described = {split_name(name)[0] for name in read} | set(folders)  # by a table of the same name
    if own and (unread := [name for name in files if name not in read and split_name(name)[0] not in described]):
        passed.append((folder, unread))


def _units_at(path: AddressPath) -> list[Unit]:
    entries = [entry for entry in path.list() if not entry.path.name.startswith(".")]
    folder, files = path if path.is_dir() else path.parent, [entry.path.name for entry in entries if not entry.is_dir]
    if foreign := [name for name in files if _suffix(name) in _NAMING_KINDS or split_name(name)[1] in IMAGE_SUFFIXES]:
        raise ConfigError(
            f"{folder / foreign[0]} is not read at an address, where tars and parquet files are; copy its folder to a "
            "disk, or download with --output-format webdataset"
        )
    tars, tables = ([name for name in files if _suffix(name) == kind] for kind in (".tar", ".parquet"))
    units = [_unit_of_file(folder / name) for name in tars]
    units += [unit for entry in entries if entry.is_dir for unit in _units_at(entry.path)]
    return units or [_unit_of_file(folder / name) for name in tables]


def _suffix(name: str) -> str:
    return f".{split_name(unpacked_name(name))[1]}"


def _unit_of_file(path: Path, has_control: bool = False) -> Unit:
    return _FILE_KINDS[_suffix(path.name)](path, has_control)
