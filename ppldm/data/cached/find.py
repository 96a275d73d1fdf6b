"""Which files of a folder are the cached ones of a part."""

import os
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ...utils.errors import PartError
from .file import read_key
from .key import CacheKey, EmbeddingsKey, LatentsKey

_UNFINISHED = ".unfinished"


def cached_path(part: Path, key: CacheKey, folder: Path | None = None) -> Path:
    """The file of a part's arrays: beside it, or in `folder`."""
    return (folder or part.parent) / f"{part.name}.{key.digest[:8]}{key.suffix}"


def unfinished_path(target: Path) -> Path:
    """Where a cached file is made before it gets its name."""
    return target.with_name(f".{target.name}{_UNFINISHED}")


def find_cached(part: Path, key: CacheKey, folder: Path | None) -> Path:
    """The file of `key` for a part, which need not be on this machine where `key.part` is None.

    Raises PartError, which says in what the files that are there differ, and the command that makes what is missing.
    """
    path = cached_path(part, key, folder)
    if path.is_file():
        return path
    others = list_cached(path.parent, key.suffix).get(part.name, [])
    if not others:
        raise PartError(f"{part} has no cached {key.what} in {path.parent}; make them with `{key.command}`")
    differences = {other: key.differences(read_key(other)) for other in others}
    same = [other for other, words in differences.items() if not words]
    if len(same) == 1:
        return same[0]
    if same:
        raise PartError(
            f"{path.parent} holds {key.what} of {len(same)} parts named {part.name}, and the part itself is not here "
            "to say which; keep them in folders of their own"
        )
    nearest = min(others, key=lambda other: len(differences[other]))
    raise PartError(
        f"{nearest} was made of something else: {'; '.join(differences[nearest])}; make what this run needs with "
        f"`{key.command}`, or run with what the {key.what} were made of"
    )


def find_alike(part: Path, key: LatentsKey, folder: Path | None) -> list[Path]:
    """The files of a part whose latents are as of this key, whichever shapes they have; the key's own file first."""
    own, alike = cached_path(part, key, folder), []
    for path in list_cached(own.parent).get(part.name, ()):
        with suppress(PartError):  # a damaged one, which serves nobody
            if path != own and not replace(key, shapes=(found := read_key(path)).shapes).differences(found):
                alike.append(path)
    return [own] * own.is_file() + alike


def list_cached(folder: Path, suffix: str = LatentsKey.suffix) -> dict[str, list[Path]]:
    """The files of one kind in a folder by the name of their part."""
    try:
        return _list_cached(folder, suffix, os.stat(folder).st_mtime_ns)
    except FileNotFoundError:
        return {}


@lru_cache(maxsize=8)
def _list_cached(folder: Path, suffix: str, changed: int) -> dict[str, list[Path]]:
    """Of so many parts, each would else list the whole folder."""
    found = {}
    for path in sorted(folder.glob(f"*{suffix}")):
        if not path.name.startswith("."):
            found.setdefault(path.name[: -len(suffix)].rpartition(".")[0], []).append(path)
    return found


def list_files(folder: Path) -> dict[str, list[Path]]:
    """The cached files of both kinds in a folder by the name of their part, those too that nobody has finished."""
    found = {}
    for path in sorted(folder.glob("*")):
        target = path.name.removesuffix(_UNFINISHED)
        target = target if target == path.name else target.removeprefix(".")
        if target.endswith((LatentsKey.suffix, EmbeddingsKey.suffix)) and not target.startswith("."):
            found.setdefault(target.rpartition(".")[0].rpartition(".")[0], []).append(path)
    return found
