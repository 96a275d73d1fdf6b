"""`ppldm forget`: converted parts without the rows of some URLs, domains, keys or files.

A part is rewritten as a whole and renamed into place, then its index, its record and the manifest are; the other rows
keep their bytes. Its cached latents and embeddings follow it (`ForgetCached`). What is forgotten is written down first,
in OUT/forgotten.json, so that no later `ppldm convert` into the folder brings it back.

The rows that were there are all reported, whatever the interruptions: OUT/.forget.json, the journal, names them, and
what runs have seen of them, before the first part is rewritten, and goes after the report has been given. A command
with other entries carries out an interrupted one as well, and reports the rows of both.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Annotated

from ...data.cached.file import CachedFile, Latents, cached_path, list_files, unfinished_path
from ...data.cached.key import LatentsKey
from ...data.filelist import write_filelist
from ...data.formats.part import Part, drop_indexes, index_path, write_lines
from ...utils.checksums import hash_file
from ...utils.errors import ConfigError, DataError, OutputError, PartError, RowError
from ...utils.files import finish_file, local_path, lock_folder, read_json, remove_leftovers, write_json
from ...utils.log import get_logger
from ...utils.processes.workers import check_workers
from ...utils.text import one_line, print_report
from ..block_list import BlockLists
from .forgotten import FORGOTTEN, Forgotten, find_rows, place_of, read_entries, read_manifest

_JOURNAL = ".forget.json"
_SHOWN = 100  # entries that were not there, in the text
REWRITTEN, DELETED, UNKNOWN = "rewritten", "deleted", "unknown"
Content = tuple[int, int]  # bytes and CRC-32 of a part
Taken = dict[str, tuple[Content, list[int]]]  # of parts by their paths: as they are now, and which rows go
_Many = Annotated[str, {"opt": True, "nargs": "+"}]


def forget(
    data: str,  # folder that `ppldm convert` has written
    url: str = None,  # text file of URLs, one a line
    domain: str = None,  # text file of domains, one a line; example.com covers www.example.com
    key: str = None,  # text file of keys, one a line; part_1/000010002 where several parts have a row 000010002
    entries: str = None,  # text file of JSON lines, {"url": "..."}, {"domain": "..."} or {"key": "..."}, for any text
    block_list: BlockLists = None,  # files of URLs and sha256:HEX, one a line
    runs: _Many = None,  # runs, or folders that hold some: which of their checkpoints have seen the rows
    latents_dir: _Many = None,  # folders with latents that lie not beside parts
    num_workers: int = 0,  # processes; 0 means one per core
    dry_run: bool = False,  # say which rows are there and change nothing
    json: bool = False,  # print the report as JSON
):
    """Take the rows of URLs, domains, keys or pictures' files out of converted parts, for good.

    Prints which of the entries were there, and in which rows; and of runs, which checkpoints have never seen these rows
    and from which one to train again. Cached latents and embeddings are rewritten without them. The pictures that the
    parts were made from, and copies of the parts elsewhere, are not touched.
    """
    wanted = read_entries(url, domain, key, entries, block_list)
    tell = partial(print_report, describe=describe, as_json=json)
    folders = [local_path(folder) for folder in latents_dir or ()]
    forget_rows(local_path(data), wanted, check_workers(num_workers), dry_run, tell, runs or (), folders)


def forget_rows(
    data: Path,
    wanted: Forgotten,
    num_workers: int = 1,
    dry_run: bool = False,
    tell: Callable[[dict], None] = lambda report: None,
    runs: Sequence[str] = (),
    latents_dirs: Sequence[Path] = (),
) -> dict:
    """Take rows out and return the report, which `tell` is given before its journal goes; row numbers are those before.
    Raises ConfigError, DataError, OutputError, and CheckpointError, with nothing changed, for a run that cannot say."""
    manifest = read_manifest(data)
    cached = ForgetCached(data, latents_dirs, dry_run)
    if runs:
        from ...runs.past import runs_with_checkpoints

        runs = runs_with_checkpoints(runs)
    if dry_run:
        found = find_rows(data, manifest, wanted, num_workers)
        cached.sweep(manifest, _list_taken(data, found), _name_pictures(wanted, found))
        report = _make_report(wanted, _list_rows(found), look_up(data, _list_rows(found), runs), cached)
        tell(report)
        return report
    with closing(lock_folder(data)):
        manifest = read_manifest(data)  # again: another process may have held the folder
        earlier, earlier_rows, seen, taken = _read_journal(data)
        folders = {str(local_path(run).resolve()) for run in runs}
        if runs and earlier.entries and not (wanted | earlier == earlier and folders <= {run["run"] for run in seen}):
            raise ConfigError(
                f"an interrupted `ppldm forget` has changed {data}, so that what --runs have seen is not known any "
                "more; give that command again as it was, or omit --runs"
            )
        wanted |= earlier
        for path, before in taken.items():
            cached.follow(path, *before)
        found = find_rows(data, manifest, wanted, num_workers)
        refuse_ambiguous_keys(manifest, wanted, found)
        seen = seen or look_up(data, _list_rows(found), runs)
        # Each once: what an interrupted run left is found again as it was.
        known = {(row["part"], row["row"], row["key"], row["url"]): row for row in (*earlier_rows, *_list_rows(found))}
        rows, taken = [*known.values()], _list_taken(data, found)
        write_json(data / _JOURNAL, {"entries": wanted.lists(), "rows": rows, "runs": seen, "taken": taken})
        (Forgotten.read(data) | wanted).write(data)
        for folder in (data, data / "parts", data / ".convert"):
            remove_leftovers(folder)
        for path in {*(data / ".recaption").glob("*")} - {data / ".recaption/plan.json"}:  # which is done
            path.unlink()
        cached.sweep(manifest, taken, _name_pictures(wanted, found))
        for path in [part["path"] for part in manifest["parts"]]:
            _update_part(data, manifest, path, set(found.get(path, ())))
            if path in taken:
                cached.follow(path, *taken[path])
        if manifest["parts"]:
            _update_filelists(data, manifest)
        report = _make_report(wanted, rows, seen, cached)
        tell(report)
        (data / _JOURNAL).unlink()
        if not manifest["parts"]:
            raise DataError(f"no row of {data} is left; delete the folder")
    return report


def describe(report: dict) -> str:
    done = "taken out" if report["removed"] else "found; nothing was changed"
    lines = [f"{report['rows_found']} row(s) {done}"]
    lines += [f"  {one_line(entry)}: {count}" for entry, count in report["entries"].items()]
    lines += [f"  {one_line(entry)}: not there" for entry in report["not_found"][:_SHOWN]]
    if (more := len(report["not_found"]) - _SHOWN) > 0:
        lines.append(f"  and {more:,} more that are not there; --json names them")
    to_be = "" if report["removed"] else "to be "
    counts = sorted(Counter(report["cached"].values()).items())
    lines += [f"  files of cached latents and embeddings {to_be}{done}: {count}" for done, count in counts]
    lines += [
        f"  {file} has embeddings of other captions under the name of a part; delete it if they are not of other data"
        for file in report["cached_unknown"]
    ]
    if report["runs"]:
        from ...runs.past import describe_past

        lines += [line for run in report["runs"] for line in describe_past(run)]
    return "\n".join(lines)


def look_up(data: Path, rows: list[dict], runs: Sequence[str]) -> list[dict]:
    """Which checkpoints of each run have seen none of the rows (`Past.start_again`). Raises CheckpointError."""
    if not runs:
        return []
    from ...runs.past import opened_past

    data, of_parts, reports = data.resolve(), {}, []
    for row in rows:
        of_parts.setdefault(row["part"], []).append(row["row"])
    for run in runs:
        with opened_past(run) as past:
            numbers = [one for part, own in of_parts.items() for one in past.rows_of(data / part, own)]
            reports.append(past.start_again(numbers))
    return reports


def refuse_ambiguous_keys(manifest: dict, wanted: Forgotten, found: dict[str, dict]) -> None:
    """Raises ConfigError where a key names rows of several folders: most of them are somebody else's."""
    sources = {part["path"]: part.get("source", "") for part in manifest["parts"]}
    named = {}
    for path, rows in found.items():
        for entries, meta in rows.values():
            for entry in wanted.keys.intersection(entries):
                named.setdefault(entry, set()).add(place_of(meta, sources[path]))
    for key, several in sorted(named.items()):
        if len(several) > 1:
            raise ConfigError(
                f"key {key} is in {len(several)} places ({', '.join(sorted(several)[:3])}); name the one that "
                f"is meant, such as {min(several)}/{key.rpartition('/')[2]}"
            )


def _list_taken(data: Path, found: dict[str, dict]) -> Taken:
    return {path: (content_of(data / path), sorted(rows)) for path, rows in found.items()}


def _name_pictures(wanted: Forgotten, found: dict[str, dict]) -> Forgotten:
    """The rows that are taken out, wherever they are: keys begin anew in other data, and pictures do not."""
    digests = {meta.get("sha256") for rows in found.values() for _, meta in rows.values()} - {None}
    return Forgotten(wanted.urls, wanted.domains, hashes=wanted.hashes | digests)


def _list_rows(found: dict[str, dict]) -> list[dict]:
    return [
        {"part": path, "row": row, "key": meta.get("key"), "url": meta.get("url"), "entries": entries}
        for path, rows in found.items()
        for row, (entries, meta) in rows.items()
    ]


def _make_report(wanted: Forgotten, rows: list[dict], seen: list[dict], cached: "ForgetCached") -> dict:
    """{rows_found, removed, entries: {entry: rows}, not_found: [entry], rows: [{part, row, key, url, entries}], runs:
    [`Past.start_again`], cached: {file: what became of it}, cached_unknown: [file]}."""
    counts = Counter(entry for row in rows for entry in row["entries"])
    return {
        "rows_found": len(rows),
        "removed": not cached.dry_run,
        "entries": {entry: counts[entry] for entry in wanted.entries if counts[entry]},
        "not_found": [entry for entry in wanted.entries if not counts[entry]],
        "rows": sorted(rows, key=lambda row: (row["part"], row["row"])),
        "runs": seen,
        "cached": {path: done for path, done in sorted(cached.done.items()) if done != UNKNOWN},
        "cached_unknown": sorted(path for path, done in cached.done.items() if done == UNKNOWN),
    }


def _read_journal(data: Path) -> tuple[Forgotten, list[dict], list[dict], Taken]:
    """The entries of an interrupted run, the rows that it had found, what `look_up` gave, and of each part what it was
    and which rows it loses. Raises OutputError where it is damaged."""
    path = data / _JOURNAL
    try:
        journal = loads(path.read_text(encoding="utf-8"))
        entries, rows = Forgotten.parse(journal["entries"]), list(journal["rows"])
        seen = list(journal.get("runs", ()))
        taken = {path: ((size, crc32), rows) for path, ((size, crc32), rows) in journal.get("taken", {}).items()}
    except FileNotFoundError:
        return Forgotten(), [], [], {}
    except (JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise OutputError(
            f"{path} is damaged ({error}), the journal of an interrupted `ppldm forget`; delete it, and the rows that "
            "were taken out before will not be reported"
        ) from error
    get_logger().info("an interrupted `ppldm forget` of %d entries is finished and reported too", len(entries.entries))
    return entries, rows, seen, taken


def _update_part(data: Path, manifest: dict, path: str, rows: set[int]) -> None:
    """Rewrite a part without some rows, if any; then have record and manifest say what is there. That these differ,
    without rows to remove, is what a killed run leaves."""
    part, entry = data / path, next(entry for entry in manifest["parts"] if entry["path"] == path)
    if not rows and (part.stat().st_size if part.exists() else 0) == entry["bytes"]:
        return
    kept = 0
    if part.exists():
        with closing(Part(part)) as old:
            left = [row for row in range(len(old)) if row not in rows]
            kept = len(left)
            if rows and left:
                sizes = {row: (int(old.widths[row]), int(old.heights[row])) for row in left}
                write_lines(part, ((old.read_line(row), sizes[row]) for row in left))
        if not kept:  # its index first
            drop_indexes(part)
            part.unlink()
    num_removed = entry["rows"] - kept
    facts = {"rows": kept, "bytes": part.stat().st_size, "sha256": hash_file(part)} if kept else {"rows": 0}
    record_path = data / ".convert" / f"{part.name}.json"
    record = read_json(record_path)
    if record:
        index_sha256 = hash_file(index_path(part)) if kept else None
        record |= {"bytes": facts.get("bytes", 0), "sha256": facts.get("sha256"), "index_sha256": index_sha256}
        _count(record, record["rows_out"] - kept)
        write_json(record_path, record)
    _count(manifest, num_removed)
    entry |= facts
    if not kept:
        manifest["parts"].remove(entry)
        if manifest["parts"]:
            _update_filelists(data, manifest)
    write_json(data / "manifest.json", manifest)


def _count(account: dict, num_removed: int) -> None:
    """Move rows from those out to those skipped."""
    if num_removed:
        account["rows_out"] -= num_removed
        account.get("not_utf8", {})["example"] = ""  # which may be of one of them
        skipped = account["skipped"]
        account["skipped"] = dict(sorted({**skipped, FORGOTTEN: skipped.get(FORGOTTEN, 0) + num_removed}.items()))


def _update_filelists(data: Path, manifest: dict) -> None:
    write_filelist(data / f"{manifest['name']}.filelist", [part["path"] for part in manifest["parts"]])


def content_of(part: Path) -> Content | None:
    """None of a part that is not there."""
    if not part.exists():
        return None
    with closing(Part(part)) as rows:
        return rows.identity[0], rows.identity[1]


class ForgetCached:
    """The cached latents and embeddings beside the parts of the folder `data` and in `folders`. `done`: by its path,
    what became of each that had to be looked at; dry_run: what would.

    A file of the part as it was is rewritten without the rows. A file of another content, or one that cannot be read,
    may hold the rows: beside the parts it is removed. In a folder of its own it may be of other data whose parts have
    the same names: there it is removed where its texts name a row that is taken out. Embeddings have no texts: they go
    with latents of the same content, and are reported where there are none.
    """

    def __init__(self, data: Path, folders: Iterable[Path], dry_run: bool = False):
        self._data, self.dry_run, self.done = data, dry_run, {}
        self._beside = (data / "parts").resolve()
        self._folders = dict.fromkeys([self._beside, *(folder.resolve() for folder in folders)])

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
                    self._settle(file, done if done != REWRITTEN or self.dry_run else None)
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
                        _rewrite(file, part, rows, now)
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
            for row in range(len(latents)):
                with suppress(RowError):
                    if named.covers(latents.texts(row).meta, ""):
                        return DELETED
        return None

    def _settle(self, file: Path, done: str | None) -> None:
        if done:
            self.done[str(file)] = done
        if done in (REWRITTEN, DELETED) and not self.dry_run:
            file.unlink()


def _rewrite(file: Path, part: Path, rows: list[int], content: Content) -> None:
    """Beside a cached file of `part`, write what it has without `rows`, for the part as it is now."""
    with closing(CachedFile(file)) as cached:
        key, gone = replace(cached.key, part=content), set(rows)
        target = cached_path(part, key, file.parent)
        cached.copy_rows(unfinished_path(target), key, [row for row in range(len(cached)) if row not in gone])
    if not file.name.startswith("."):
        finish_file(unfinished_path(target), target)


def _content_in(file: Path) -> Content | None:
    """That of the part that a cached file was made of; None of one that cannot be read."""
    try:
        with closing(CachedFile(file)) as cached:
            return cached.key.part
    except PartError:
        return None
