"""`ppldm dataset get`: from an entry to files to train on: fetch, extract, convert, verify; of tables of URLs, fetch
and `ppldm pipeline`.

Each stage keeps what is finished, so the same command goes on wherever it was stopped, and given twice it makes the
data once. Later runs keep the list of files, and the commit of the hub, that the first one saw, but not expiring links.

    OUT/source/             files as they were fetched
    OUT/rows/               tars of samples, where files needed captions or names of columns (`extract`)
    OUT/data/               part files and NAME.filelist.list, what training takes
    OUT/pipeline/           of tables of URLs: all of `ppldm pipeline`, its data/ among it
    OUT/report.json         rows and bytes of each stage
    OUT/.dataset/           the list of files, captions, and what is finished
"""

import csv
import os
import shlex
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import yaml

from ...data.formats.folder import IMAGE_SUFFIXES
from ...utils.checksums import hash_file
from ...utils.errors import ConfigError, DataError, EnvironmentProblem
from ...utils.files import (
    count_free_bytes,
    local_path,
    make_output_dir,
    read_json,
    remove_leftovers,
    write_json,
    write_text,
)
from ...utils.finished import JobFolder, Piece, find_finished, finish, list_pieces, make_key, take_state
from ...utils.log import get_logger, progress
from ...utils.processes.workers import check_workers, map_unordered
from ...utils.stages import Stage, run_stage, tell
from ...utils.text import print_report
from .entry import SIZES, Entry, Source, expand, find_entry
from .extract import extract, make_captions
from .fetch import RemoteFile, fetch, is_fetched, measure_speed, refusal

_HIDDEN = ".dataset"
_ROWS_PER_CORE_SECOND = 60  # converted: pictures of a million pixels decoded, shrunk and encoded
_SIDE, _LEAST_SIDE, _FILTER = 512, 256, "bicubic"  # as micro_diffusion prepares its sets
_NAMING_TABLES = (".csv", ".jsonl")
_PICTURES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)
_SMALL_SHARE = 0.01


def get(
    name: str,  # of `ppldm dataset list`, or hf:OWNER/NAME for any data set of the Hugging Face hub
    size: Annotated[str, {"choices": SIZES}],  # small, about 1 %, or all
    overrides: Annotated[list, {"opt": False, "nargs": "*", "type": str}] = (),  # of sets of URLs: download.retries=2
    out: Annotated[str, {"opt": True, "required": True}] = "",  # folder for everything; made if missing
    links: str = "",  # the list of links, for sets whose links expire
    files: Annotated[list, {"nargs": "*", "type": str, "opt": True}] = (),  # these only, by name: {0..9} and * work
    image_col: str = "",  # of hf:OWNER/NAME: column of the pictures; by default image, jpg, ...
    caption_col: str = "",  # of hf:OWNER/NAME: column of the captions; by default text, caption, ...
    url_col: str = "",  # of hf:OWNER/NAME: column of URLs to download, where there are no pictures
    min_size: int = None,  # shorter short sides, in pixels, are left out; by default 256, of URLs what the set says
    short_side: int = None,  # a longer short side is shrunk to it, in pixels; 0 means never; by default 512
    remove_archives: bool = False,  # remove each archive once its rows are extracted
    precompute: str = "",  # flags of `ppldm precompute`, in quotes, to make latents at the end
    num_workers: int = 0,  # processes; 0 means one per core. The data do not depend on it
    master: str = "",  # a Spark cluster, such as spark://host:7077, whose nodes share --out
    dry_run: bool = False,  # say how many bytes and hours it takes, ask the source, and write nothing
    json: bool = False,  # print the report as JSON instead of text
):
    """Fetch a data set, extract and convert it, and verify every row.

    Stopped at any point, the same command goes on; given twice, it makes the data once. URLs of pictures
    that are under --min-size by their metadata are not fetched. Terms of the data are yours to accept: the command says
    where.
    """
    if size not in SIZES:
        raise ConfigError(f"the size is {size!r}; it must be small or all")
    entry = find_entry(name, files, {"image": image_col, "caption": caption_col, "url": url_col})
    if overrides and not entry.pipeline:
        raise ConfigError(f"{overrides[0]} is for sets of URLs, and {name} has pictures; omit it")
    if entry.withdrawn:
        get_logger().warning("%s: %s", name, entry.withdrawn)
    for flag, pixels in (("--min-size", min_size), ("--short-side", short_side)):
        if pixels is not None and pixels < 0:
            raise ConfigError(f"{flag} is {pixels}; it must be 0 or more")
    words = tuple(shlex.split(precompute)), tuple(overrides)
    more = *words, min_size, short_side
    request = Request(entry, size, local_path(out), links, num_workers, master, remove_archives, *more)
    if dry_run:
        print_report(project(request), _describe_projection, json)
        return
    print_report(get_dataset(request), lambda report: _describe_report(report, entry), json)


@dataclass(frozen=True)
class Request:
    """links: path of their list. precompute: words of its flags. overrides: settings of the pipeline, key=value.
    min_size, short_side: pixels, 0 for any; None for micro_diffusion's, and of URLs for those of the entry."""

    entry: Entry
    size: str
    out: Path
    links: str = ""
    num_workers: int = 0
    master: str = ""
    remove_archives: bool = False
    precompute: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    min_size: int | None = None
    short_side: int | None = None

    @property
    def name(self) -> str:
        return self.entry.name.rpartition("/")[2].removeprefix("hf:")

    @property
    def job(self) -> JobFolder:
        return JobFolder(self.out, _HIDDEN, "data set")

    @property
    def settings(self) -> dict:
        """What decides the result: another command must not have the folder."""
        sources = [asdict(one) for one in (*self.entry.pictures, *self.entry.captions)]
        named = {"name": self.entry.name, "size": self.size, "columns": self.entry.columns}
        sizes = {"min_size": self.min_size, "short_side": self.short_side}
        named |= {name: pixels for name, pixels in sizes.items() if pixels is not None}
        return named | {"sources": sources, "query": self.entry.query}


@dataclass(frozen=True)
class FileTask:
    """One file to fetch to a folder of the data set and, with `extracts`, to make a tar of."""

    request: Request
    file: RemoteFile
    folder: str = "source"
    extracts: bool = False

    @property
    def tar(self) -> Path:
        return self.request.out / "rows" / f"{self.file.name}.tar"

    @property
    def record(self) -> Path:
        return self.request.job.notes / "rows" / f"{self.file.name}.json"

    @property
    def most_rows(self) -> int:
        """Of the tar; 0 for all."""
        return self.request.entry.small_rows if self.request.size == "small" else 0

    def key(self) -> dict:
        """Settings and input of the tar; of the captions' making, what it was made from."""
        made = (read_json(self.request.job.record_path("captions")) or {}).get("key", {}).get("input", {})
        settings: dict = {"file": self.file.name, "size": self.file.size, "sha256": self.file.sha256}
        settings |= {"columns": self.request.entry.columns, "most_rows": self.most_rows}
        return {"settings": settings, "input": {"content": made.get("content", "")}}

    def is_whole(self, record: dict) -> bool:
        """Whether the tar is that of a record."""
        if record["output"] == take_state(list_pieces(self.tar)):
            return True
        return (hash_file(self.tar) if self.tar.is_file() else None) == record["sha256"]


def map_files(tasks: list[FileTask], num_workers: int, master: str) -> list[dict]:
    """The accounts of tasks in their order, by processes of this machine or by Spark."""
    if not tasks:
        return []
    for folder in {task.record.parent for task in tasks if task.extracts}:
        make_output_dir(folder)
    if master:
        from ...utils.machine.spark import DRIVER_MEMORY_GB, run_tasks, spark_session

        with spark_session(master, DRIVER_MEMORY_GB) as spark:
            return [account for _, account in run_tasks(spark, "fetch", tasks, get_file)]
    made = map_unordered(get_file, tasks, check_workers(num_workers))
    done = {task.file.name: one for task, one in progress(made, total=len(tasks), desc="files", unit="file")}
    return [done[task.file.name] for task in tasks]


def get_file(task: FileTask) -> dict:
    """Fetch a file and, where it is to be, extract it, unless that is done; its account, or only {"bytes"}."""
    folder, entry = task.request.out / task.folder, task.request.entry
    if not task.extracts:
        return {"bytes": fetch(task.file, folder).stat().st_size}

    def make() -> dict:
        path = fetch(task.file, folder)
        captions = task.request.job.notes / "captions.parquet" if entry.captions else None
        account = extract(path, task.tar, captions, entry.columns, task.most_rows)
        return account | {"bytes": path.stat().st_size, "output": take_state(list_pieces(task.tar))}

    record, _ = finish(task.record, task.key(), task.is_whole, make)
    if task.request.remove_archives:
        (folder / task.file.name).unlink(missing_ok=True)
    return record


def get_files(request: Request) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """(files of pictures or URLs, of captions), as the first run saw them, with today's links. Raises PpldmError."""
    known = read_json(request.job.record_path("files"))
    if known and not request.job.check(request.settings):
        today, kinds = read_links(request.links) if request.links else {}, ("pictures", "captions")
        pictures, captions = ([RemoteFile(**file) for file in known[kind]] for kind in kinds)
        return [replace(file, url=today.get(file.name, file.url)) for file in pictures], captions
    entry = request.entry
    pictures = list_files(entry, entry.pictures, request.size, request.links)
    return pictures, list_files(entry, entry.captions, request.size) if entry.captions else []


def _extracts(entry: Entry, files: list[RemoteFile]) -> bool:
    """Whether files become tars of samples before they are converted."""
    needed = entry.columns or any(file.name.endswith(_NAMING_TABLES) for file in files)
    return bool(entry.captions) or bool(needed and not entry.pipeline)


def project(request: Request) -> dict:
    """Bytes and hours that are still to come, by the size that is stated and the speed of the first file; as published,
    with `unreachable`, where the source cannot be reached. Writes nothing. Raises PpldmError."""
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
        pictures, captions = get_files(request)
        extracts = _extracts(entry, pictures)
        tasks = [FileTask(request, file, extracts=extracts) for file in (*captions, *pictures)]
        folders = out / "source", out / "captions"
        waiting = [task for task in tasks if not any(is_fetched(task.file, folder) for folder in folders)]
        made = (one.extracts and find_finished(one.record, one.key(), one.is_whole) is not None for one in waiting)
        left = [task.file for task, is_made in zip(waiting, made, strict=True) if not is_made]
        speed, first_size = measure_speed(left[0]) if left else (0.0, None)
    except EnvironmentProblem as error:
        if not entry.gigabytes:
            raise
        published = round(entry.gigabytes * 1e9 * (1 if entry.small_rows else share))
        return plan | {"files": None, "bytes_left": published, "fetch_hours": None, "unreachable": str(error)}
    known = [file.size for file in left if file.size is not None] or [first_size or 0]
    num_bytes = round(sum(known) * len(left) / len(known))
    plan |= {"files": len(tasks), "files_left": len(left), "bytes_left": num_bytes}
    return plan | {"fetch_hours": round(num_bytes / speed / 3600, 2) if left and speed else 0.0}


def get_dataset(request: Request) -> dict:
    """Run all stages, and return the report. Raises PpldmError."""
    job, out, entry, workers = request.job, request.out, request.entry, (request.num_workers, request.master)
    pictures, captions = get_files(request)
    with job.claimed(request.settings):
        for folder, _, _ in os.walk(out):
            remove_leftovers(folder)
        if not job.record_path("files").exists():
            files = [replace(file, url="") if file.is_link else file for file in pictures]  # whose links expire
            known = {"pictures": [*map(asdict, files)], "captions": [*map(asdict, captions)]}
            write_json(job.record_path("files"), known)
        report: dict[str, Any] = {"name": entry.name, "size": request.size}
        if captions:
            tell(f"captions: {len(captions)} file(s)")
            map_files([FileTask(request, file, "captions") for file in captions], *workers)
            table, record = job.notes / "captions.parquet", job.record_path("captions")
            paths = [out / "captions" / file.name for file in captions]
            key = make_key({"query": entry.query}, (Piece(path, path.name) for path in paths), record)
            make = partial(make_captions, paths, entry.query, table)
            report["captions"] = finish(record, key, lambda _: table.exists(), make)[0]["captions"]
        extracts = _extracts(entry, pictures)
        tell(f"{'fetch and extract' if extracts else 'fetch'}: {len(pictures)} file(s)")
        # Pictures that tables name come before these, and are not extracted themselves.
        named = [file for file in pictures if extracts and file.name.lower().endswith(_PICTURES)]
        fetched = map_files([FileTask(request, file) for file in named], *workers)
        tasks = [FileTask(request, file, extracts=extracts) for file in pictures if file not in set(named)]
        accounts = map_files(tasks, *workers)
        report |= {"files": len(pictures), "bytes": sum(one["bytes"] for one in fetched + accounts)}
        if entry.pipeline:
            report |= _run_pipeline(request, [out / "source" / task.file.name for task in tasks])
        else:
            if extracts:
                skipped = sum((Counter(one["skipped"]) for one in accounts), Counter())
                report["extracted"] = {name: sum(one[name] for one in accounts) for name in ("rows_in", "rows_out")}
                report["extracted"] |= {"skipped": dict(sorted(skipped.items()))}
            report |= _convert(request, report)
        _verify(request, Path(report["file_list"]))
        if request.precompute:
            words = ("python", "-m", "ppldm", "precompute", report["file_list"], *request.precompute)
            run_stage(Stage("precompute", "latents", words, 0), stdout=sys.stderr)
        write_json(out / "report.json", report)
    return report


def _convert(request: Request, report: dict) -> dict:
    from ..convert.convert import convert_source
    from ..convert.reencode import Treatment

    out, name = request.out, request.name
    tell("convert")
    sizes = zip((request.short_side, request.min_size), (_SIDE, _LEAST_SIDE), strict=True)
    side, least = (usual if pixels is None else pixels for pixels, usual in sizes)
    treatment = Treatment(size=side, min_size=least, interpolation=_FILTER)
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
        return {"verified": True}

    finish(record, make_key({}, [Piece(manifest, manifest.name)], record), lambda found: "verified" in found, run)


def _run_pipeline(request: Request, tables: list[Path]) -> dict:
    """Filter, download and convert tables of URLs; `parts`: those there, of how many, where not all are wanted."""
    from ..pipeline import pipeline, read_config

    folder, stated = request.out / "pipeline", request.entry.pipeline
    changes = stated.get("small", {}) if request.size == "small" else {}
    settings = {name: {**stated.get(name, {}), **changes.get(name, {})} for name in ("filter", "download", "convert")}
    settings["convert"]["name"] = request.name
    if request.short_side is not None:
        settings["download"]["image_size"] = request.short_side
    if (least := request.min_size) is not None:
        settings["download"]["min_image_size"] = settings["convert"]["min_size"] = least
        if {"preset", "min_width"} & settings["filter"].keys():  # whose tables have sizes
            settings["filter"] |= {"min_width": least, "min_height": least}
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
    """The files of sources, in order. Raises ConfigError, DataError, EnvironmentProblem."""
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
    known, facts = {}, {"page": entry.page}
    if source.links:
        if not links:
            raise ConfigError(
                f"{entry.name} comes by a list of links that expire; get it at {entry.page} and add --links FILE"
            )
        known = {name: {"url": url} for name, url in read_links(links).items()}
        facts["is_link"] = True
    elif source.hub:
        known, facts["is_hub"] = _list_hub(entry, source), True
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

    from ...utils.machine.hub_names import network_errors

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
    except network_errors() as error:
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


def _describe_projection(plan: dict) -> str:
    rows = f"about {plan['rows']:,} rows, " if plan["rows"] else ""
    room = "" if plan["bytes_free"] > 2 * plan["bytes_left"] else "; the disk has too little room for it and its parts"
    fetch, why = f"{plan['bytes_left'] / 1e9:,.2f} GB", ""
    if "unreachable" in plan:
        fetch, why = f"about {fetch} to fetch, as published", f"; not asked, {plan['unreachable']}"
    else:
        files = f"{plan['files_left']} of {plan['files']} file(s) to fetch"
        fetch = f"{files}, {fetch} in {plan['fetch_hours']} h at the speed measured"
    return (
        f"{rows}{fetch}, {plan['convert_hours']} h to convert; "
        f"{plan['bytes_free'] / 1e9:,.0f} GB are free{room}; nothing was written{why}"
    )


def _describe_report(report: dict, entry: Entry) -> str:
    lines = [f"{report['name']} {report['size']}: {report['files']} file(s), {report['bytes'] / 1e6:,.1f} MB fetched"]
    for stage in ("extracted", "converted", *report.get("stages", ())):
        counts = report.get(stage) or report.get("stages", {}).get(stage)
        if counts:
            left_out = counts.get("skipped", counts.get("dropped", {}))
            lines.append(f"{stage}: {counts['rows_out']:,} of {counts['rows_in']:,} rows")
            lines += [f"  left out, {reason}: {count:,}" for reason, count in left_out.items()]
    if "parts" in report:
        there, parts = report["parts"]
        more = next((number for number in range(1, parts + 1) if number not in there), None)
        told = f"; the same command with download.part_id={more} adds another" if more else ""
        lines.append(f"part {', '.join(map(str, there))} of {parts} is there{told}")
    flags = f" {entry.training_flags}" if entry.training_flags else ""
    return "\n".join([*lines, f"for ppldm train: --file_list {report['file_list']}{flags}"])
