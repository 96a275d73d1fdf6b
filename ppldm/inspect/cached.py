"""What the files of cached latents and embeddings beside parts hold: for `ppldm stats`, and, byte by byte, `verify`;
and `ppldm cached`, which lists them by what they were made of and removes what nobody needs.

A row that is missing is not a fault: another `--where`, or training that has not come to it. A fault is damage, and a
file beside a part of another content; those in a folder of their own may be of parts that are not listed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np

from ..data.cached.file import MISSING, PRESENT, CachedFile, list_files, read_key
from ..data.cached.key import CacheKey, EmbeddingsKey
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.open import summarize
from ..data.formats.row import EXAMPLES_PER_REASON
from ..utils.checksums import digest_of
from ..utils.errors import ConfigError, DataError, PartError
from ..utils.log import progress
from ..utils.processes.workers import map_in_threads, map_unordered
from ..utils.text import print_report
from .parts import PartName, list_parts

Content = tuple[int, int] | None  # bytes and CRC-32 of a part; None: it is not here to say
_COUNTED = ("files", "rows", "complete", "missing", "bad", "damaged", "bytes")
# How parts are read, and which they are, does not matter for what is kept of them.
_OF_PARTS = ("part", "format", "layout", "idx_to_prompt")


@dataclass(frozen=True)
class _Found:
    """A file of latents or embeddings, and the contents of the parts that it may be of."""

    path: Path
    contents: frozenset[Content]
    is_beside: bool

    def state(self, key: CacheKey) -> str:
        """Whether a file of this key is `current`, `stale` or, in a folder of its own, of `other` parts."""
        if None in self.contents or key.part in self.contents:
            return "current"
        return "stale" if self.is_beside else "other"


def survey(parts: Iterable[PartName], num_workers: int, check_bytes: bool) -> dict:
    """{"cached": a report of each key, "bad_files": {path: error}} of the files of parts, in several processes; empty
    where there are none. check_bytes: read all, and compare checksums."""
    found = _find_files(list(parts))
    if not found:
        return {}
    kept: dict[str, dict] = {}
    errors = {}
    measured = map_unordered(partial(_measure, check_bytes=check_bytes), found, num_workers)
    for file, (own, error) in progress(measured, total=len(found), desc="latents", unit="file", delay=1):
        if error:
            errors[str(file.path)] = error
        elif own:
            total = kept.setdefault(str(own["settings"]), own)
            if total is not own:
                total.update({name: total[name] + own[name] for name in _COUNTED})
    for total in kept.values():
        total["bad"] = dict(total["bad"].most_common())
        total["examples"] = [f"{path} row {row}" for path, row in sorted(total["damaged"])[:EXAMPLES_PER_REASON]]
        total["damaged"] = len(total["damaged"])
    return {"cached": [kept[settings] for settings in sorted(kept)], "bad_files": dict(sorted(errors.items()))}


def cached(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    latents_dir: str = "",  # folder with the files; by default they lie beside the parts
    delete: Annotated[str, {"opt": True, "nargs": "+"}] = None,  # stale, other, or the digits before a line
    json: bool = False,  # print the lines as JSON
):
    """List the cached latents and text embeddings of parts by what they were made of, and remove those of some lines.

    Files are `stale` that are beside a part but of another content than it has, or cannot be read; in a folder of
    --latents-dir those of another content may be of `other` data.
    """
    lines: dict[tuple, dict] = {}
    for file in _find_files(list_parts(filelists, layout, must_exist=False, latents_dir=latents_dir), unfinished=True):
        try:
            key = read_key(file.path)
            settings = _settings_of(key)
            made = digest_of(settings)[:8], file.state(key), key.what, _describe_settings(settings)
        except PartError:
            made = "-" * 8, "stale", "a file", "which cannot be read"
        line = lines.setdefault(made, {"files": 0, "bytes": 0, "paths": []})
        line["files"] += 1
        line["bytes"] += file.path.stat().st_blocks * 512
        line["paths"].append(str(file.path))
    names = ("id", "state", "what", "made_of")
    wanted, report = set(delete or ()), [dict(zip(names, own, strict=True)) | line for own, line in lines.items()]
    if missing := wanted - {"stale", "other"} - {line["id"] for line in report}:
        raise ConfigError(f"--delete {min(missing)} is neither stale, other nor the digits before a line")
    for line in report:
        line["deleted"] = bool({line["id"], line["state"]} & wanted)
        for path in line["paths"] if line["deleted"] else ():
            Path(path).unlink()
    print_report(report, _describe_lines, json)


def _describe_lines(report: list[dict]) -> str:
    lines = [
        f"{line['id']}  {line['state']:<8}{line['what']}, {line['made_of']}: {line['files']} file(s), "
        f"{line['bytes'] / 1e9:.3f} GB" + ("; deleted" if line["deleted"] else "")
        for line in report
    ]
    return "\n".join(lines or ["no cached latents or text embeddings are there"])


def has_faults(survey: dict) -> bool:
    """Whether anything of a survey must be made again."""
    return bool(survey.get("bad_files")) or any(one["damaged"] for one in survey.get("cached", ()))


def describe_survey(survey: dict) -> list[str]:
    lines = []
    for one in survey.get("cached", ()):
        lines.append(
            f"{one['what']} of {one['complete']} of {one['rows']} rows, {_describe_settings(one['settings'])}: "
            f"{one['files']} file(s), {one['bytes'] / 1e9:.3f} GB"
        )
        lines += [f"  missing: {one['missing']}"] if one["missing"] else []
        lines += [f"  bad rows, {reason}: {count}" for reason, count in one["bad"].items()]
        lines += [f"  damaged: {one['damaged']}, for example {one['examples'][0]}"] if one["damaged"] else []
    errors = list(survey.get("bad_files", {}).values())
    return lines + [f"  cannot be used: {error}" for error in errors[:10]]


def _find_files(parts: list[PartName], unfinished: bool = False) -> list[_Found]:
    """The files of parts, each once, sorted. unfinished: those too that a process is writing, or has left so."""
    contents = defaultdict(set)
    for part, content in zip(parts, map_in_threads(_content, parts, "looking for latents"), strict=True):
        contents[part.source.latents_dir or part.path.parent, part.path.name].add(content)
    folders = {folder: list_files(folder) for folder, _ in contents}
    is_beside = all(part.source.latents_dir is None for part in parts)
    found = {
        path: _Found(path, frozenset(own), is_beside)
        for (folder, name), own in contents.items()
        for path in folders[folder].get(name, ())
        if unfinished or path.name[0] != "."
    }
    return [found[path] for path in sorted(found)]


def _content(part: PartName) -> Content:
    try:
        return summarize(part.path, part.source).content if part.path.exists() else None
    except DataError:
        return None


def _measure(found: _Found, check_bytes: bool) -> tuple[dict | None, str | None]:
    """(what a file holds, why it cannot be used); neither where it is of a part that is not listed. `complete` rows
    have all that is to be kept of them; damaged: (path, row)."""
    try:
        file = CachedFile(found.path)
    except PartError as error:
        return None, str(error)
    key = file.key
    if (state := found.state(key)) != "current":
        stale = f"{found.path} was made of another content of its part; delete it, and make it again: `{key.command}`"
        return None, stale if state == "stale" else None
    rows = len(file) - isinstance(key, EmbeddingsKey)  # whose last is the empty caption
    counts = np.zeros(256, np.int64)
    counts[: len(file.cells.counts)] = file.cells.counts
    wanted = np.arange(file.num_variants) < counts[np.asarray(file.codes)][:, None]
    states = np.asarray(file.states)
    is_bad = (states[:rows] > PRESENT).any(axis=1)
    is_missing = (wanted & (states == MISSING))[:rows].any(axis=1) & ~is_bad
    bad = Counter(file.reason(row, int((states[row] > PRESENT).argmax())) for row in np.flatnonzero(is_bad).tolist())
    cells = np.argwhere(states != MISSING).tolist() if check_bytes else []
    own = {
        "what": key.what,
        "settings": _settings_of(key),
        "files": 1,
        "rows": rows,
        "complete": rows - int(is_bad.sum() + is_missing.sum()),
        "missing": int(is_missing.sum()),
        "bad": bad,
        "damaged": [(str(found.path), row) for row, variant in cells if file.is_damaged(row, variant)],
        "examples": [],
        "bytes": found.path.stat().st_blocks * 512,
    }
    file.close()
    return own, None


def _settings_of(key: CacheKey) -> dict:
    return {name: value for name, value in key.facts.items() if name not in _OF_PARTS}


def _describe_settings(settings: dict) -> str:
    if "shapes" not in settings:
        captions = f", captions {' '.join(settings['captions'])}" if settings["captions"] else ""
        return f"{settings['model_max_length']} tokens{captions}, {settings['dtype']}, of {settings['text_encoder']}"
    (height, width), *others = settings["shapes"]
    more = f" and {len(others)} other shape(s)" if others else ""
    flips = ", flips" if settings["flips"] else ""
    crops = f"{width} x {height}{more}, crops {settings['crops']}{flips}"
    return f"{crops}, {settings['dtype']}, of {settings['autoencoder']}"
