"""`ppldm forget`: converted parts without the rows of some URLs, domains or keys.

A part is rewritten as a whole and renamed into place, then its index, its record and the manifest are; the other rows
keep their bytes. What is forgotten is written down first, in OUT/forgotten.json, so that no later `ppldm convert` into
the folder brings it back. Stopped at any point, the same command goes on.
"""

import sys
from collections import Counter
from contextlib import closing
from json import dumps
from pathlib import Path

from ..data.filelist import write_filelist
from ..data.part import Part, index_path, write_lines
from ..utils.errors import DataError
from ..utils.files import file_sha256, lock_folder, read_json, write_json
from ..utils.workers import check_workers
from .converted import find_rows, read_manifest
from .forgotten import FORGOTTEN, Forgotten, read_entries, read_forgotten, write_forgotten


def forget(
    data: str,  # folder that `ppldm convert` has written
    url: str = None,  # text file of URLs, one a line
    domain: str = None,  # text file of domains, one a line; example.com covers www.example.com
    key: str = None,  # text file of keys, one a line
    num_workers: int = 0,  # processes; 0 means one per core
    dry_run: bool = False,  # say which rows are there and change nothing
    json: bool = False,  # print the report as JSON
):
    """Take the rows of URLs, domains or keys out of converted parts, for good.

    Prints which of the entries were there, and in which rows. The pictures that the parts were made from, and copies of
    the parts elsewhere, are not touched.
    """
    wanted = read_entries(url, domain, key)
    report = forget_rows(Path(data), wanted, check_workers(num_workers), dry_run)
    sys.stdout.write((dumps(report, indent=2, ensure_ascii=False) if json else describe(report)) + "\n")


def forget_rows(data: Path, wanted: Forgotten, num_workers: int = 1, dry_run: bool = False) -> dict:
    """Take rows out and return {rows_found, entries: {entry: rows}, not_found: [entry], rows: [{part, row, key, url}]}.

    Row numbers are those before. Raises ConfigError, DataError, OutputError.
    """
    manifest = read_manifest(data)
    lock = None if dry_run else lock_folder(data)
    counts, rows = Counter(), []
    try:
        if not dry_run:
            write_forgotten(data, read_forgotten(data) | wanted)
        for path, found in find_rows(data, manifest, wanted, num_workers):
            for row, (entries, meta) in found.items():
                counts.update(entries)
                rows.append({"part": path, "row": row, "key": meta.get("key"), "url": meta.get("url")})
            if not dry_run:
                _update_part(data, manifest, path, set(found))
        if not dry_run:
            _update_filelists(data, manifest)
    finally:
        if lock:
            lock.close()
    return {
        "rows_found": len(rows),
        "removed": not dry_run,
        "entries": {entry: counts[entry] for entry in wanted.entries if counts[entry]},
        "not_found": [entry for entry in wanted.entries if not counts[entry]],
        "rows": sorted(rows, key=lambda row: (row["part"], row["row"])),
    }


def describe(report: dict) -> str:
    """A report as text."""
    done = "taken out" if report["removed"] else "found; nothing was changed"
    lines = [f"{report['rows_found']} row(s) {done}"]
    lines += [f"  {entry}: {count}" for entry, count in report["entries"].items()]
    lines += [f"  {entry}: not there" for entry in report["not_found"]]
    return "\n".join(lines)


def _update_part(data: Path, manifest: dict, path: str, rows: set[int]) -> None:
    """Rewrite a part without some rows, if any; then have record and manifest say what is there.

    That the manifest and the part differ, without rows to remove, is what a killed run leaves.
    """
    part, entry = data / path, next(entry for entry in manifest["parts"] if entry["path"] == path)
    if not rows and (part.stat().st_size if part.exists() else 0) == entry["bytes"]:
        return
    kept = _rewrite(part, rows)
    num_removed = entry["rows"] - kept
    facts = {"rows": kept, "bytes": part.stat().st_size, "sha256": file_sha256(part)} if kept else {"rows": 0}
    record_path = data / ".convert" / f"{part.name}.json"
    record = read_json(record_path)
    if record:
        index_sha256 = file_sha256(index_path(part)) if kept else None
        record |= {"bytes": facts.get("bytes", 0), "sha256": facts.get("sha256"), "index_sha256": index_sha256}
        _count(record, record["rows_out"] - kept)
        write_json(record_path, record)
    _count(manifest, num_removed)
    entry |= facts
    if not kept:
        manifest["parts"].remove(entry)
        _update_filelists(data, manifest)
    write_json(data / "manifest.json", manifest)


def _rewrite(path: Path, rows: set[int]) -> int:
    """The rows that are left; a part without any is removed, its index first."""
    if not path.exists():
        return 0
    with closing(Part(path)) as part:
        left = [row for row in range(len(part)) if row not in rows]
        if rows and left:
            sizes = {row: (int(part.widths[row]), int(part.heights[row])) for row in left}
            write_lines(path, ((part.read_line(row), sizes[row]) for row in left))
    if not left:
        index_path(path).unlink(missing_ok=True)
        path.unlink()
    return len(left)


def _count(account: dict, num_removed: int) -> None:
    """Move rows from those out to those skipped."""
    if num_removed:
        account["rows_out"] -= num_removed
        skipped = account["skipped"]
        account["skipped"] = dict(sorted({**skipped, FORGOTTEN: skipped.get(FORGOTTEN, 0) + num_removed}.items()))


def _update_filelists(data: Path, manifest: dict) -> None:
    if not manifest["parts"]:
        raise DataError(f"no row of {data} is left; delete the folder")
    write_filelist(data / f"{manifest['name']}.filelist", [part["path"] for part in manifest["parts"]])
