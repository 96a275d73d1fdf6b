"""From an entry to files to train on: fetch, extract, convert, verify; of tables of URLs, fetch and `ppldm pipeline`.

Each stage keeps what is finished, so the same command goes on wherever it was stopped, and given twice it makes the
data once. The list of files is made once: later runs keep the commit of the hub that the first one saw. Of a list of
links only names are kept, since the links expire.

    OUT/source/             files as they were fetched
    OUT/rows/               tars of samples, where files needed captions or names of columns (`file_tasks`)
    OUT/data/               part files and NAME.filelist.list, what training takes
    OUT/pipeline/           of tables of URLs: all of `ppldm pipeline`, its data/ among it
    OUT/report.json         rows and bytes of each stage
    OUT/.dataset/           the list of files, captions, and what is finished
"""

import csv
import os
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlsplit

from ...data.formats.sample_files import IMAGE_SUFFIXES
from ...utils.errors import ConfigError, DataError, EnvironmentProblem
from ...utils.files import (
    count_free_bytes,
    make_output_dir,
    read_json,
    remove_leftovers,
    write_json,
    write_text,
)
from ...utils.jobs import JobFolder, Piece, finish, make_key
from ...utils.log import get_logger
from ...utils.processes.workers import check_workers
from ...utils.stages import Stage, run_stage, tell
from .captions import make_captions
from .entry import Entry, Source, expand
from .fetch import RemoteFile, is_fetched, measure_speed, refusal
from .file_tasks import FileTask, fetch_only, get_file, map_files

_HIDDEN = ".dataset"
_ROWS_PER_CORE_SECOND = 60  # converted: pictures of a million pixels decoded, shrunk and encoded
_SIDE, _LEAST_SIDE, _FILTER = 512, 256, "bicubic"  # as micro_diffusion prepares its sets
_TAKEN = "verified"
_NAMING_TABLES = (".csv", ".jsonl")
_PICTURES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)
_SMALL_SHARE = 0.01


@dataclass(frozen=True)
class Request:
    """What is asked for. links: path of the list of links. precompute: flags of `ppldm precompute`, words. overrides:
    settings of the pipeline, key=value."""

    entry: Entry
    size: str
    out: Path
    links: str = ""
    num_workers: int = 0
    master: str = ""
    remove_archives: bool = False
    precompute: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of filelists."""
        return self.entry.name.rpartition("/")[2].removeprefix("hf:")

    @property
    def job(self) -> JobFolder:
        """The folder with its records."""
        return JobFolder(self.out, _HIDDEN, "data set")

    @property
    def settings(self) -> dict:
        """What decides the result: another command must not have the folder."""
        sources = [asdict(one) for one in (*self.entry.pictures, *self.entry.captions)]
        named = {"name": self.entry.name, "size": self.size, "columns": self.entry.columns}
        return named | {"sources": sources, "query": self.entry.query}


def get_files(request: Request) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """(files of pictures or URLs, of captions), as the first run saw them. Raises PpldmError."""
    known = read_json(request.job.record_path("files"))
    if known and not request.job.check(request.settings):
        return from_record(known["pictures"], request.links), from_record(known["captions"], request.links)
    entry = request.entry
    pictures = list_files(entry, entry.pictures, request.size, request.links)
    return pictures, list_files(entry, entry.captions, request.size) if entry.captions else []


def _extracts(entry: Entry, files: list[RemoteFile]) -> bool:
    """Whether files become tars of samples before they are converted."""
    needed = entry.columns or any(file.name.endswith(_NAMING_TABLES) for file in files)
    return bool(entry.captions) or bool(needed and not entry.pipeline)


def project(request: Request) -> dict:
    """Bytes and hours that are still to come: the size that is stated, the speed of the first file, on this machine.
    Where the source cannot be reached, `unreachable` says why, and bytes are those published of the whole set or of its
    share. Writes nothing. Raises PpldmError, also where the source refuses this user."""
    request.job.check(request.settings)
    entry, out, share = request.entry, request.out, _SMALL_SHARE if request.size == "small" else 1
    rows = round((entry.rows or 0) * share)
    plan = {
        "name": entry.name,
        "size": request.size,
        "bytes_free": count_free_bytes(next(one for one in (out, *out.absolute().parents) if one.is_dir())),
        "rows": rows or None,
        "convert_hours": round(rows / _ROWS_PER_CORE_SECOND / check_workers(request.num_workers) / 3600, 2),
    }
    try:
        return plan | _ask_source(request)
    except EnvironmentProblem as error:
        if not entry.gigabytes:
            raise
        published = round(entry.gigabytes * 1e9 * (1 if entry.small_rows else share))
        return plan | {"files": None, "bytes_left": published, "fetch_hours": None, "unreachable": str(error)}


def _ask_source(request: Request) -> dict:
    """How many files and bytes are left, and how long they take to fetch. Raises PpldmError."""
    pictures, captions = get_files(request)
    extracts = _extracts(request.entry, pictures)
    left = [file for file in (*captions, *pictures) if not _is_done(request, file, extracts)]
    speed, first_size = measure_speed(left[0]) if left else (0.0, None)
    known = [file.size for file in left if file.size is not None] or [first_size or 0]
    num_bytes = round(sum(known) * len(left) / len(known)) if left else 0
    return {
        "files": len(pictures) + len(captions),
        "files_left": len(left),
        "bytes_left": num_bytes,
        "fetch_hours": round(num_bytes / speed / 3600, 2) if left and speed else 0.0,
    }


def get_dataset(request: Request) -> dict:
    """Run all stages, and return the report. Raises PpldmError."""
    job, out, workers = request.job, request.out, (request.num_workers, request.master)
    pictures, captions = get_files(request)
    with job.claimed(request.settings):
        for folder, _, _ in os.walk(out):
            remove_leftovers(folder)
        if not job.record_path("files").exists():
            write_json(job.record_path("files"), {"pictures": as_record(pictures), "captions": as_record(captions)})
        report: dict[str, Any] = {"name": request.entry.name, "size": request.size}
        if captions:
            tell(f"captions: {len(captions)} file(s)")
            map_files(fetch_only, [_fetch_task(request, file, "captions") for file in captions], *workers)
            report |= _make_captions(request, [out / "captions" / file.name for file in captions])
        extracts = _extracts(request.entry, pictures)
        tell(f"{'fetch and extract' if extracts else 'fetch'}: {len(pictures)} file(s)")
        # Pictures that tables name come before these, and are not extracted themselves.
        named = [file for file in pictures if extracts and file.name.lower().endswith(_PICTURES)]
        accounts = map_files(fetch_only, [_fetch_task(request, file, "source") for file in named], *workers)
        num_bytes = sum(one["bytes"] for one in accounts)
        tasks = [_picture_task(request, file, extracts) for file in pictures if file not in set(named)]
        accounts = map_files(get_file, tasks, *workers)
        report |= {"files": len(pictures), "bytes": num_bytes + sum(one["bytes"] for one in accounts)}
        if request.entry.pipeline:
            report |= _run_pipeline(request, [task.source / task.file.name for task in tasks])
        else:
            report |= {"extracted": _add_up(accounts)} if extracts else {}
            report |= _convert(request, report)
        _verify(request, Path(report["file_list"]))
        if request.precompute:
            words = ("python", "-m", "ppldm", "precompute", report["file_list"], *request.precompute)
            run_stage(Stage("precompute", "latents", words, 0), stdout=sys.stderr)
        write_json(out / "report.json", report)
    return report


def _is_done(request: Request, file: RemoteFile, extracts: bool) -> bool:
    task = _picture_task(request, file, extracts)
    if is_fetched(file, task.source) or is_fetched(file, request.out / "captions"):
        return True
    return task.is_extracted()


def _fetch_task(request: Request, file: RemoteFile, folder: str) -> FileTask:
    return FileTask(file, request.out / folder, request.out)


def _picture_task(request: Request, file: RemoteFile, extracts: bool) -> FileTask:
    task = _fetch_task(request, file, "source")
    if not extracts:
        return task
    entry, notes = request.entry, request.job.notes
    made = (read_json(notes / "captions.json") or {}).get("key", {}).get("input", {}).get("content", "")
    return replace(
        task,
        record=notes / "rows" / f"{file.name}.json",
        tar=request.out / "rows" / f"{file.name}.tar",
        captions=notes / "captions.parquet" if entry.captions else None,
        content=made,
        columns=tuple(sorted(entry.columns.items())),
        most_rows=entry.small_rows if request.size == "small" else 0,
        remove=request.remove_archives,
    )


def _make_captions(request: Request, files: list[Path]) -> dict:
    table, record = request.job.notes / "captions.parquet", request.job.record_path("captions")
    key = make_key({"query": request.entry.query}, (Piece(path, path.name) for path in files), record)
    made, _ = finish(record, key, lambda _: table.exists(), partial(make_captions, files, request.entry.query, table))
    return {"captions": made["captions"]}


def _add_up(accounts: list[dict]) -> dict:
    skipped = sum((Counter(one["skipped"]) for one in accounts), Counter())
    totals = {name: sum(one[name] for one in accounts) for name in ("rows_in", "rows_out")}
    return totals | {"skipped": dict(sorted(skipped.items()))}


def _convert(request: Request, report: dict) -> dict:
    from ..convert.convert import convert_source
    from ..convert.reencode import Treatment

    out, name = request.out, request.name
    tell("convert")
    treatment = Treatment(size=_SIDE, min_size=_LEAST_SIDE, interpolation=_FILTER)
    source = out / ("rows" if "extracted" in report else "source")
    options = {"num_workers": request.num_workers, "master": request.master or None}
    manifest = convert_source(source, out / "data", name, treatment=treatment, **options)
    given = report.get("extracted", {}).get("rows_out", manifest["rows_in"])
    if manifest["rows_in"] != given:
        raise DataError(f"{source} gave {manifest['rows_in']:,} of {given:,} rows: were its files changed by hand?")
    counts = {name: manifest[name] for name in ("rows_in", "rows_out", "skipped")}
    return {"converted": counts, "file_list": str(out / "data" / f"{name}.filelist.list")}


def _verify(request: Request, file_list: Path) -> None:
    """Read every row as training will, once for a conversion."""
    words = ("python", "-m", "ppldm", "verify", str(file_list), "--num-workers", str(request.num_workers))
    manifest, record = file_list.parent / "manifest.json", request.job.record_path("verify")

    def run() -> dict:
        tell("verify")
        run_stage(Stage("verify", "reading every row", words, 0), stdout=sys.stderr)
        return {_TAKEN: True}

    finish(record, make_key({}, [Piece(manifest, manifest.name)], record), lambda found: bool(found.get(_TAKEN)), run)


def _run_pipeline(request: Request, tables: list[Path]) -> dict:
    """Filter, download and convert tables of URLs; `parts`: which of how many of the filter's parts are
    downloaded, where not all were asked for."""
    import yaml

    from ..pipeline import pipeline, read_config

    folder, stated = request.out / "pipeline", request.entry.pipeline
    changes = stated.get("small", {}) if request.size == "small" else {}
    settings = {name: {**stated.get(name, {}), **changes.get(name, {})} for name in ("filter", "download", "convert")}
    settings["convert"]["name"] = request.name
    if request.master:
        settings["filter"] |= {"master": request.master}
        settings["download"] |= {"distributor": "pyspark", "master": request.master}
        settings["convert"] |= {"master": request.master}
    make_output_dir(folder)
    metadata = [str(path.relative_to(request.out)) for path in tables]
    file = request.out / "pipeline.yaml"
    write_text(file, yaml.safe_dump({"out": "pipeline", "metadata": metadata, **settings}, sort_keys=False))
    get_logger().info("running ppldm pipeline %s", file)
    with redirect_stdout(sys.stderr):
        pipeline(str(file), list(request.overrides))
    report, chosen = read_json(folder / "report.json"), read_config(file, list(request.overrides)).stages
    there = sorted(int(path.name[5:]) for path in (folder / "images").glob("part_*") if path.name[5:].isdigit())
    parts = chosen["filter"].get("num_partitions") or len(tables)
    taken = {"parts": [there, parts]} if chosen["download"].get("part_id") else {}
    return {"stages": report["stages"], "file_list": report["file_list"], **taken}


def list_files(entry: Entry, sources: tuple[Source, ...], size: str, links: str = "") -> list[RemoteFile]:
    """The files of sources, in order. links: the path of the list, where there is one. Raises ConfigError, DataError,
    EnvironmentProblem."""
    several = len({source.hub for source in sources}) > 1
    files = []
    for source in sources:
        folder = f"{source.hub.rpartition('/')[2]}/" if several else ""
        files += [replace(file, name=folder + file.name) for file in _list(entry, source, size, links)]
    if not files:
        raise DataError(f"{entry.name} has no files {', '.join(p for s in sources for p in s.all)}; see {entry.page}")
    for file in files:
        if not file.name or PurePosixPath(file.name).is_absolute() or ".." in PurePosixPath(file.name).parts:
            raise DataError(f"{entry.name} names the file {file.name!r}, which would lie elsewhere; see {entry.page}")
    return files


def as_record(files: list[RemoteFile]) -> list[dict]:
    """For a JSON file: without the links that expire."""
    return [asdict(file) | ({"url": ""} if file.is_link else {}) for file in files]


def from_record(stated: list[dict], links: str = "") -> list[RemoteFile]:
    """What `as_record` gave, with today's links where a list of them is given."""
    today = read_links(links) if links else {}
    return [RemoteFile(**one | ({"url": today[one["name"]]} if one["name"] in today else {})) for one in stated]


def read_links(path: str) -> dict[str, str]:
    """The addresses by name of a list: a header line, then name, tab, address. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = [line for line in csv.reader(file, delimiter="\t") if len(line) == 2]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--links {path} cannot be read ({error}); name the list of links as you got it") from error
    found = {name.strip(): url.strip() for name, url in lines if url.strip().startswith("http")}
    if not found:
        raise ConfigError(f"--links {path} has no lines of a name, a tab and a link; name the list as you got it")
    return found


def _list(entry: Entry, source: Source, size: str, links: str) -> list[RemoteFile]:
    if source.links:
        if not links:
            raise ConfigError(
                f"{entry.name} comes by a list of links that expire; get it at {entry.page} and add --links FILE"
            )
        known = {name: {"url": url} for name, url in read_links(links).items()}
        facts = {"page": entry.page, "is_link": True}
    elif source.hub:
        known, facts = _list_hub(entry, source), {"page": entry.page, "is_hub": True}
    else:
        known, facts = {}, {"page": entry.page}
    found = []
    for pattern in source.patterns(size):
        for name in expand(pattern):
            if not (source.links or source.hub):
                found.append(RemoteFile(urlsplit(name).path.rpartition("/")[2], name, **facts))
                continue
            names = [one for one in known if fnmatchcase(one, name)]
            if not names and "*" not in name:
                raise DataError(f"{entry.name}: {source.hub or links} has no {name}; see {entry.page}")
            found += [RemoteFile(one, **known[one], **facts) for one in sorted(names)]
    if size == "small" and not source.small and source.hub and len(found) > 1:
        found = found[: max(1, round(len(found) * _SMALL_SHARE))]
    return found


def _list_hub(entry: Entry, source: Source) -> dict[str, dict]:
    """Files of a repository by name. Raises DataError, EnvironmentProblem."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from requests.exceptions import RequestException

    api = HfApi()
    try:
        commit = api.dataset_info(source.hub, revision=source.revision).sha
        files = api.list_repo_tree(source.hub, recursive=True, revision=commit, repo_type="dataset")
        sizes = {one.path: one for one in files if hasattr(one, "size")}
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (429, 500, 502, 503, 504):
            raise EnvironmentProblem(f"the hub answers {status}; give the same command again later") from error
        raise refusal(RemoteFile(source.hub, "", page=entry.page), status) from error
    except RequestException as error:
        raise EnvironmentProblem(
            f"the hub cannot be reached ({type(error).__name__}); check the network, or HF_ENDPOINT for a mirror"
        ) from error
    return {
        name: {
            "url": f"{api.endpoint}/datasets/{source.hub}/resolve/{commit}/{quote(name)}",
            "size": one.size,
            "sha256": one.lfs.sha256 if one.lfs else None,
        }
        for name, one in sizes.items()
    }
