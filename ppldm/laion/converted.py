"""A folder that `ppldm convert` has written, and a search through the metadata of its rows."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from json import JSONDecodeError, loads
from pathlib import Path

from ..data.part import Part
from ..utils.errors import ConfigError, DataError, RowError
from ..utils.log import progress
from ..utils.workers import map_unordered
from .forgotten import Forgotten


def read_manifest(data: Path) -> dict:
    """The manifest of a finished conversion. Raises ConfigError, DataError."""
    try:
        return loads((data / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"no manifest.json in {data}; name a folder that `ppldm convert` has finished") from error
    except (JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{data / 'manifest.json'} is damaged ({error}); run `ppldm convert` again") from error


def find_rows(data: Path, manifest: dict, wanted: Forgotten, num_workers: int) -> Iterator[tuple[str, dict]]:
    """(path of a part, {row: (entries that name it, its metadata)}) of each part of a manifest."""
    parts = [(part["path"], part.get("source", "")) for part in manifest["parts"]]
    with progress(total=len(parts), desc="searching", unit="part") as bar:
        for (path, _), found in map_unordered(partial(_search, data=data, wanted=wanted), parts, num_workers):
            yield path, found
            bar.update()


def _search(named: tuple[str, str], data: Path, wanted: Forgotten) -> dict[int, tuple[list[str], dict]]:
    found, (path, source) = {}, named
    if not (data / path).exists():  # a killed `ppldm forget` has taken the whole part out
        return found
    with closing(Part(data / path)) as part:
        for row in range(len(part)):
            try:
                _, meta = part.read_fields(row)
            except RowError:
                continue  # `ppldm verify` counts these
            if entries := wanted.covers(meta, source):
                found[row] = entries, meta
    return found
