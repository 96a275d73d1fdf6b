"""`ppldm recaption`: converted parts with a further caption in each row, from a file or from a command.

Laws. Every row goes to OUT with its own caption, picture and metadata, in its place, and one field more where there is
a caption for it. Rows in = rows captioned + rows without a caption.

    OUT/parts/, NAME.filelist, NAME.filelist.list    as `ppldm convert` has them; forget and lineage take OUT
    OUT/manifest.json                                written last; `captions` says of each field where it came from
    OUT/.recaption/                                  what the same command needs to go on; may be deleted when done

A command gets rows as JSON lines on its standard input, {"row", "key", "caption", "image": base64}, and answers with
lines {"row", "caption"} in any order, each kept as it comes; a row without an answer has no caption.
"""

import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import datetime, timezone
from functools import partial
from itertools import accumulate
from json import dumps, loads
from pathlib import Path
from typing import Annotated

from ...data.filelist import write_filelist
from ...data.formats.part import Part, write_lines
from ...data.formats.row import encode_text_columns
from ...utils.checksums import digest_of, hash_file
from ...utils.errors import ConfigError, DataError, EnvironmentProblem, RowError
from ...utils.files import local_path, read_json, remove_path, write_json, write_text
from ...utils.finished import JobFolder, Piece, finish, list_pieces, make_key, take_fingerprint
from ...utils.log import get_logger, progress
from ...utils.processes.workers import check_workers
from ...utils.store.cache import input_path
from ...utils.text import print_report
from .forget import refuse_ambiguous_keys
from .forgotten import Forgotten, find_rows, read_manifest

_HIDDEN = ".recaption"
_NAMES = ("sha256", "key", "url")  # of rows in a file of captions, the most exact first


def recaption(
    data: str,  # folder that `ppldm convert` has written; it is not changed
    out: Annotated[str, {"opt": True, "required": True}],  # folder for the parts with captions; made if missing
    captions: str = "",  # JSON lines: {"caption": ...} with the "sha256", "key" or "url" of a row
    command: str = "",  # or a command that gets rows as JSON lines and answers with captions; see docs/data.md
    name: str = "caption_2",  # the field of the metadata that they go to; train with --captions caption:1,NAME:1
    num_workers: int = 0,  # processes that look through the keys of rows; 0 means one per core
    redo: bool = False,  # replace what --out holds of other data or captions
    json: bool = False,  # print the manifest's account as JSON
):
    """Add captions of a file, or of a command such as a captioning model, to converted parts.

    Writes new parts, in which each row has its old caption and the new one. Stopped at any point, the same command goes
    on; a command is not asked again for what it has answered.
    """
    if bool(captions) == bool(command):
        raise ConfigError("name captions either by --captions FILE or by --command 'COMMAND'")
    if not name or name == "caption":
        raise ConfigError(f"--name {name!r} is the row's own caption, which stays; choose another, such as caption_2")
    source = input_path(captions) if captions else command
    report = recaption_rows(local_path(data), local_path(out), source, name, check_workers(num_workers), redo)
    print_report(report, partial(describe, out=out), json)


def recaption_rows(data: Path, out: Path, source: Path | str, name: str, num_workers: int = 1, redo=False) -> dict:
    """Write the parts of `data` with captions of a file (a path) or command (a text) into `out`; return the account of
    the field `name` in the manifest. Raises ConfigError, DataError, OutputError, EnvironmentProblem."""
    manifest = read_manifest(data)
    if out.resolve() == data.resolve():
        raise ConfigError(f"--out {out} is the data themselves, which stay as they are; name another folder")
    is_file = isinstance(source, Path)
    try:
        told = {"file": source.name, "sha256": hash_file(source)} if is_file else {"command": source}
    except OSError as error:
        raise ConfigError(f"cannot read --captions {source} ({error.strerror}); name a file of JSON lines") from error
    job, settings = JobFolder(out, _HIDDEN, "recaption", "parts"), {"name": name, "captions": [*told.values()][-1]}
    earlier = (job.plan or {}).get("input")
    content = take_fingerprint([Piece(data / "manifest.json", "manifest.json")], earlier)
    if not job.check(settings, redo, content) and (done := read_json(out / "manifest.json")):
        get_logger().info("%s was finished before", out)
        return done["captions"][name]
    wanted, find = _read_captions(source, data, manifest, num_workers) if is_file else (set(), None)

    def clear() -> None:
        made_before = *(out / "parts").glob("*"), *out.glob("*.filelist*"), *job.notes.glob("*.json*")
        for path in (out / "manifest.json", *made_before):
            if path.name != "plan.json":
                remove_path(path)

    with job.claimed(settings, redo, content, clear):
        if not is_file:
            find = _ask(source, data, manifest, job.notes / "answers.jsonl")
        made = [_make_part(data, out, part, name, find, digest_of(settings)) for part in manifest["parts"]]
        captioned, used = sum(one["captioned"] for one in made), {entry for one in made for entry in one["used"]}
        account = {**told, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        account |= {"rows": manifest["rows_out"], "captioned": captioned, "missing": manifest["rows_out"] - captioned}
        account |= {"unused": len(wanted - used)} if is_file else {}
        files = [{key: one[key] for key in ("bytes", "sha256")} for one in made]
        parts = [part | file for part, file in zip(manifest["parts"], files, strict=True)]
        write_filelist(out / f"{manifest['name']}.filelist", [part["path"] for part in parts])
        listing = f"{manifest['name']}.filelist.list"
        write_text(out / listing, (data / listing).read_text(encoding="utf-8"))
        all_captions = manifest.get("captions", {}) | {name: account}
        write_json(out / "manifest.json", manifest | {"parts": parts, "captions": all_captions})
    return account


def describe(report: dict, out: str) -> str:
    lines = [f"{report['captioned']:,} of {report['rows']:,} rows have a new caption"]
    lines += [f"  no caption: {report['missing']:,}"] if report["missing"] else []
    lines += [f"  captions of rows that are not there: {report['unused']:,}"] if report.get("unused") else []
    return "\n".join([*lines, f"train with the filelist list in {out}, and --captions (docs/data.md)"])


def _read_captions(path: Path, data: Path, manifest: dict, num_workers: int) -> tuple[set[str], Callable]:
    """(all names of rows, what gives the caption of a row) of a file. Raises ConfigError, DataError."""
    found = {kind: {} for kind in _NAMES}
    with open(path, encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                told = loads(line)
                kind = next(kind for kind in _NAMES if isinstance(told.get(kind), str))
                row, caption = told[kind], told["caption"]
            except (ValueError, AttributeError, StopIteration, KeyError) as error:
                like = '{"key": "...", "caption": "..."}, nor with "sha256" or "url"'
                raise ConfigError(f"--captions: line {number} of {path} is not like {like}") from error
            if isinstance(caption, str) and caption.strip() and found[kind].setdefault(row, caption) != caption:
                raise ConfigError(f"--captions: line {number} of {path} has another caption for {kind} {row}; keep one")
    named = Forgotten(urls=frozenset(found["url"]), keys=frozenset(found["key"]), hashes=frozenset(found["sha256"]))
    keys = Forgotten(keys=named.keys)
    if keys.keys and len(manifest["parts"]) > 1:
        rows = find_rows(data, manifest, keys, num_workers)
        refuse_ambiguous_keys(manifest, keys, rows)
    captions = {entry: caption for kind in reversed(_NAMES) for entry, caption in found[kind].items()}

    def find(part: dict, row: int, meta: dict) -> tuple[str | None, list[str]]:
        entries = named.covers(meta, part.get("source", ""))
        return (captions[entries[-1]], entries) if entries else (None, [])

    return set(captions), find


def _ask(command: str, data: Path, manifest: dict, journal: Path) -> Callable:
    """What gives the caption of a row, once a command has answered for all. Raises EnvironmentProblem, DataError."""
    text = journal.read_text(encoding="utf-8") if journal.exists() else ""
    whole = text[: text.rfind("\n") + 1]  # without a line that a killed run left unfinished
    if whole != text:
        write_text(journal, whole)
    answers, numbers = dict(map(loads, whole.splitlines())), _first_rows(manifest)
    if len(answers) < sum(part["rows"] for part in manifest["parts"]):
        _run(command, data, manifest, answers, journal)

    def find(part: dict, row: int, meta: dict) -> tuple[str | None, list[str]]:
        return answers.get(numbers[part["path"]] + row) or None, []

    return find


def _run(command: str, data: Path, manifest: dict, answers: dict[int, str], journal: Path) -> None:
    try:
        words = shlex.split(command)
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"--command {command!r} cannot be started ({error}); check it in a shell") from error
    known = frozenset(answers)

    def feed() -> None:
        """Write the rows that have no answer yet. A command that closes its input early has its reasons."""
        with suppress(BrokenPipeError), child.stdin:
            for path, first in _first_rows(manifest).items():
                with closing(Part(data / path)) as rows:
                    for row in range(len(rows)):
                        if first + row in known:
                            continue
                        with suppress(RowError):
                            caption, meta = rows.read_fields(row)
                            image = rows.read_line(row).rstrip(b"\n").split(b"\t")[2].decode("ascii")
                            told = {"row": first + row, "key": meta.get("key"), "caption": caption, "image": image}
                            child.stdin.write(dumps(told) + "\n")

    feeder = threading.Thread(target=feed, daemon=True)
    num_rows = sum(part["rows"] for part in manifest["parts"])
    try:
        feeder.start()
        with (
            open(journal, "a", encoding="utf-8") as file,
            progress(total=num_rows, initial=len(known), desc="captions", unit="row") as bar,
        ):
            for line in child.stdout:
                try:
                    told = loads(line)
                    row, caption = int(told["row"]), str(told["caption"] or "")
                except (ValueError, TypeError, KeyError) as error:
                    wanted = '{"row": 0, "caption": "…"}'
                    raise DataError(
                        f"--command answered {line.strip()[:200]!r}; each line must be like {wanted}"
                    ) from error
                if row not in answers and 0 <= row < num_rows:
                    answers[row] = caption
                    file.write(dumps([row, caption]) + "\n")
                    file.flush()
                    bar.update()
        status = child.wait()
    finally:
        child.kill()
        child.wait()
    if status:
        raise EnvironmentProblem(
            f"--command ended with status {status} after {len(answers) - len(known)} captions, which are kept; see "
            "what it printed, and give the same command again"
        )


def _first_rows(manifest: dict) -> dict[str, int]:
    """The number of each part's first row among all, by its path."""
    rows = [part["rows"] for part in manifest["parts"]]
    return dict(zip([part["path"] for part in manifest["parts"]], accumulate(rows, initial=0), strict=False))


def _make_part(data: Path, out: Path, part: dict, name: str, find: Callable, settings: str) -> dict:
    """Write a part unless it is finished; return {captioned, used, bytes, sha256}."""
    source, target = data / part["path"], out / part["path"]
    record = out / _HIDDEN / f"{target.name}.json"
    key = make_key({"settings": settings}, list_pieces(source), record)

    def make() -> dict:
        captioned, used = 0, set()

        def lines() -> Iterator[tuple[bytes, tuple[int, int]]]:
            nonlocal captioned
            for row in range(len(rows)):
                line = rows.read_line(row)
                with suppress(RowError):  # such a row stays what it is; `ppldm verify` counts it
                    own, meta = rows.read_fields(row)
                    if name in meta:
                        raise ConfigError(
                            f"{source} row {row} has a {name} already, which stays; choose another --name"
                        )
                    caption, entries = find(part, row, meta)
                    if caption:
                        line = encode_text_columns(own, meta | {name: caption}) + line.split(b"\t", 2)[2]
                        captioned += 1
                        used.update(entries)
                yield line, (int(rows.widths[row]), int(rows.heights[row]))

        with closing(Part(source)) as rows:
            write_lines(target, lines())
        facts = {"bytes": target.stat().st_size, "sha256": hash_file(target)}
        return {"captioned": captioned, "used": sorted(used), **facts}

    return finish(record, key, lambda made: target.is_file() and hash_file(target) == made["sha256"], make)[0]
