"""The cached latents and embeddings of converted parts from which rows are taken out.

A file of the part as it was is rewritten for the part as it is now, without the rows; its other arrays are copied, so
that no time of a network is lost. A file of another content, or one that cannot be read, serves nobody and may hold the
rows: beside the parts it is removed. In a folder of its own it may be of other data whose parts have the same names:
there it is removed where its texts name a row that is taken out. Embeddings have no texts: they go with latents of the
same content, and are reported where there are none.
"""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ...data.cached.file import CachedFile, cached_path, list_files, unfinished_path
from ...data.cached.key import LatentsKey
from ...data.cached.latents import Latents
from ...data.formats.part import Part
from ...utils.errors import PartError, RowError
from ...utils.files import finish_file
from .forgotten import Forgotten

REWRITTEN, DELETED, UNKNOWN = "rewritten", "deleted", "unknown"
Content = tuple[int, int]  # bytes and CRC-32 of a part
Taken = dict[str, tuple[Content, list[int]]]  # of parts by their paths: as they are now, and which rows go


def content_of(part: Path) -> Content | None:
    """None of a part that is not there."""
    if not part.exists():
        return None
    with closing(Part(part)) as rows:
        return rows.identity[0], rows.identity[1]


class ForgetCached:
    """The files beside the parts of the folder `data` and in `folders`. `done`: what became of each of which it had to
    be thought, by its path; dry_run: what would."""

    def __init__(self, data: Path, folders: Iterable[Path], dry_run: bool = False):
        self._data, self._dry_run, self.done = data, dry_run, {}
        self._beside = (data / "parts").resolve()
        self._folders = dict.fromkeys([self._beside, *(folder.resolve() for folder in folders)])

    def report(self) -> dict:
        """{cached: {path: what was done}, cached_unknown: [path]}."""
        unknown = [path for path, done in self.done.items() if done == UNKNOWN]
        known = {path: done for path, done in self.done.items() if done != UNKNOWN}
        return {"cached": dict(sorted(known.items())), "cached_unknown": sorted(unknown)}

    def sweep(self, manifest: dict, taken: Taken, named: Forgotten) -> None:
        """Remove the files of no content that the parts of a manifest have. named: rows that are taken out."""
        parts = {Path(part["path"]).name: part["path"] for part in manifest["parts"]}
        sizes = {part["path"]: part["rows"] for part in manifest["parts"]}
        emptied = {path for path, (_, rows) in taken.items() if len(rows) == sizes[path]}
        for folder in self._folders:
            for name, files in list_files(folder).items():
                if folder != self._beside and name not in parts:
                    continue
                path = parts.get(name, "")
                content, rows = taken.get(path) or (content_of(self._data / path) if path else None, [])
                due = DELETED if path in emptied else REWRITTEN if rows else None
                judged = {file: self._judge(file, content, due, named, folder == self._beside) for file in files}
                gone = {_content_in(file) for file, done in judged.items() if done == DELETED}
                for file, done in judged.items():
                    done = DELETED if done == UNKNOWN and _content_in(file) in gone else done
                    self._settle(file, done if done != REWRITTEN or self._dry_run else None)
            for file in folder.glob(".*.tmp"):  # half written by one that was killed
                if folder != self._beside and file.name.startswith(tuple(f".{name}." for name in parts)):
                    self._settle(file, DELETED)

    def follow(self, path: str, content: Content, rows: list[int]) -> None:
        """Rewrite the files of a part without these rows; it had `content` before they went, and may be gone."""
        part = self._data / path
        now = content_of(part)
        for folder in self._folders if now != content else ():
            for file in list_files(folder).get(part.name, ()):
                if _content_in(file) == content:
                    if now is not None:
                        rewrite(file, part, rows, now)
                    self._settle(file, REWRITTEN if now is not None else DELETED)

    def _judge(self, file: Path, content, due: str | None, named: Forgotten, is_beside: bool) -> str | None:
        found = _content_in(file)
        if found is not None and found == content:
            return due
        if is_beside or found is None:
            return DELETED
        with closing(Latents(file)) as latents:
            if not isinstance(latents.key, LatentsKey):
                return UNKNOWN
            return DELETED if any(named.covers(meta, "") for meta in _list_meta(latents)) else None

    def _settle(self, file: Path, done: str | None) -> None:
        if done:
            self.done[str(file)] = done
        if done in (REWRITTEN, DELETED) and not self._dry_run:
            file.unlink()


def rewrite(file: Path, part: Path, rows: list[int], content: Content) -> None:
    """Beside a cached file of `part`, write what it has without `rows`, for the part as it is now."""
    with closing(CachedFile(file)) as cached:
        key = replace(cached.key, part=content)
        target = cached_path(part, key, file.parent)
        gone = set(rows)
        left = [row for row in range(len(cached)) if row not in gone]
        cached.copy_rows(unfinished_path(target), key, left)
    if not file.name.startswith("."):
        finish_file(unfinished_path(target), target)


def _content_in(file: Path) -> Content | None:
    """That of the part that a cached file was made of; None of one that cannot be read."""
    try:
        with closing(CachedFile(file)) as cached:
            return cached.key.part
    except PartError:
        return None


def _list_meta(latents: Latents) -> Iterable[dict]:
    for row in range(len(latents)):
        try:
            yield latents.meta(row)
        except RowError:
            continue
