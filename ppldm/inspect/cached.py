"""What the files of cached latents and embeddings beside parts hold: for `ppldm stats`, and, byte by byte, `verify`.

A row that is missing is no fault: another `--where`, or training that has not come to it. A fault is what is damaged,
and a file beside a part of another content; those in a folder of their own may be of parts that are not listed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from ..data.bad_rows import EXAMPLES_PER_REASON
from ..data.cached.file import MISSING, PRESENT, CachedFile
from ..data.cached.key import EmbeddingsKey, LatentsKey, list_cached
from ..data.formats.open import summarize
from ..utils.errors import DataError, PartError
from ..utils.log import progress
from ..utils.processes.workers import map_in_threads, map_unordered
from .parts import PartName

Content = tuple[int, int] | None  # bytes and CRC-32 of a part; None: it is not here to say
# How parts are read, and which they are, is no property of what is kept of them.
_OF_PARTS = ("part", "format", "layout", "idx_to_prompt")


@dataclass(frozen=True)
class _Found:
    """A file of latents or embeddings, and the contents of the parts that it may be of."""

    path: Path
    contents: frozenset[Content]
    is_beside: bool


@dataclass
class Kept:
    """What files of one key hold. rows: of their parts, of which `complete` are there with all that is to be kept of
    them, `missing` not, and others bad by reason. damaged: (path, row) of what is not what was written."""

    what: str
    settings: dict
    files: int = 0
    rows: int = 0
    complete: int = 0
    missing: int = 0
    bad: Counter = field(default_factory=Counter)
    damaged: list[tuple[str, int]] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, other: "Kept") -> None:
        """Count another file in."""
        for name in ("files", "rows", "complete", "missing", "bad", "damaged", "num_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def report(self) -> dict:
        """As JSON has it."""
        examples = [f"{path} row {row}" for path, row in sorted(self.damaged)[:EXAMPLES_PER_REASON]]
        counts = {"files": self.files, "rows": self.rows, "complete": self.complete, "missing": self.missing}
        return {
            "what": self.what, "settings": self.settings, **counts, "bad": dict(self.bad.most_common()),
            "damaged": len(self.damaged), "examples": examples, "bytes": self.num_bytes,
        }  # fmt: skip


def survey(parts: Iterable[PartName], num_workers: int, check_bytes: bool) -> dict:
    """{"cached": a report of each key, "bad_files": {path: error}} of the files of parts, in several processes; empty
    where there are none. check_bytes: read all, and compare checksums."""
    found = _find_files(list(parts))
    if not found:
        return {}
    kept: dict[str, Kept] = {}
    errors = {}
    with progress(total=len(found), desc="latents", unit="file", delay=1) as bar:
        for file, (own, error) in map_unordered(partial(_measure, check_bytes=check_bytes), found, num_workers):
            if error:
                errors[str(file.path)] = error
            elif own:
                kept.setdefault(str(own.settings), Kept(own.what, own.settings)).add(own)
            bar.update()
    reports = sorted((one.report for one in kept.values()), key=lambda report: str(report["settings"]))
    return {"cached": reports, "bad_files": dict(sorted(errors.items()))}


def has_faults(survey: dict) -> bool:
    """Whether anything of a survey must be made again."""
    return bool(survey.get("bad_files")) or any(one["damaged"] for one in survey.get("cached", ()))


def describe_survey(survey: dict) -> list[str]:
    """Lines for people."""
    lines = []
    for one in survey.get("cached", ()):
        lines.append(
            f"{one['what']} of {one['complete']} of {one['rows']} rows, {_describe_settings(one['settings'])}: "
            f"{one['files']} file(s), {one['bytes'] / 1e9:.3f} GB"
        )
        lines += [f"  missing: {one['missing']}"] * bool(one["missing"])
        lines += [f"  bad rows, {reason}: {count}" for reason, count in one["bad"].items()]
        lines += [f"  damaged: {one['damaged']}, for example {one['examples'][0]}"] if one["damaged"] else []
    errors = list(survey.get("bad_files", {}).values())
    return lines + [f"  cannot be used: {error}" for error in errors[:10]]


def _find_files(parts: list[PartName]) -> list[_Found]:
    """The files of parts, each once, sorted."""
    contents = defaultdict(set)
    for part, content in zip(parts, map_in_threads(_content, parts, "looking for latents"), strict=True):
        contents[part.source.latents_dir or part.path.parent, part.path.name].add(content)
    found = {
        path: _Found(path, frozenset(own), all(part.source.latents_dir is None for part in parts))
        for (folder, name), own in contents.items()
        for key in (LatentsKey, EmbeddingsKey)
        for path in list_cached(folder, key.suffix).get(name, ())
    }
    return [found[path] for path in sorted(found)]


def _content(part: PartName) -> Content:
    try:
        return summarize(part.path, part.source).content if part.path.exists() else None
    except DataError:
        return None


def _measure(found: _Found, check_bytes: bool) -> tuple[Kept | None, str | None]:
    """(what a file holds, why it cannot be used); neither where it is of a part that is not listed."""
    try:
        file = CachedFile(found.path)
    except PartError as error:
        return None, str(error)
    key = file.key
    if None not in found.contents and key.part not in found.contents:
        stale = f"{found.path} was made of another content of its part; delete it, and make it again: `{key.command}`"
        return None, stale if found.is_beside else None
    rows = len(file) - isinstance(key, EmbeddingsKey)  # whose last is the empty caption
    counts = np.zeros(256, np.int64)
    counts[: len(file.cells.counts)] = file.cells.counts
    wanted = np.arange(file.num_variants) < counts[np.asarray(file.codes)][:, None]
    states = np.asarray(file.states)
    is_bad = (states[:rows] > PRESENT).any(axis=1)
    is_missing = (wanted & (states == MISSING))[:rows].any(axis=1) & ~is_bad
    bad = Counter(file.reason(row, int((states[row] > PRESENT).argmax())) for row in np.flatnonzero(is_bad).tolist())
    settings = {name: value for name, value in key.facts.items() if name not in _OF_PARTS}
    own = Kept(key.what, settings, 1, rows, rows - int(is_bad.sum() + is_missing.sum()), int(is_missing.sum()), bad)
    own.num_bytes = found.path.stat().st_blocks * 512
    if check_bytes:
        cells = np.argwhere(states != MISSING).tolist()
        own.damaged = [(str(found.path), row) for row, variant in cells if file.is_damaged(row, variant)]
    file.close()
    return own, None


def _describe_settings(settings: dict) -> str:
    if "shapes" not in settings:
        captions = f", captions {' '.join(settings['captions'])}" if settings["captions"] else ""
        return f"{settings['model_max_length']} tokens{captions}, {settings['dtype']}, of {settings['text_encoder']}"
    (height, width), *others = settings["shapes"]
    more = f" and {len(others)} other shape(s)" if others else ""
    flips = ", flips" if settings["flips"] else ""
    crops = f"{width} x {height}{more}, crops {settings['crops']}{flips}"
    return f"{crops}, {settings['dtype']}, of {settings['autoencoder']}"
