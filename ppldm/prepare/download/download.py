"""`ppldm download`: the pictures of tables of URLs, fetched under bounds and written by img2dataset's writers.

Before the first shard a sample of the URLs is fetched: where the network fails, the command stops, says what to mend,
and nothing is marked complete. See `shard` and `part` for what holds of the result.

A shard whose part lies at an address is made in a folder of the executor, then put there, `NNNNN_stats.json` last. Its
journal is of that machine and ends with the try: what was fetched for a shard that was not finished is fetched again.
"""

import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from json import loads
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from ...utils.errors import ConfigError, DataError, EnvironmentProblem, OutputError, PpldmError
from ...utils.files import RemotePath, count_free_bytes, make_output_dir, remove_dir, write_json
from ...utils.log import following, get_logger, progress
from ...utils.machine.spark import DRIVER_MEMORY_GB, attempt, run_tasks, spark_session, spark_session_if
from ...utils.processes.workers import map_with_deadline
from ...utils.text import one_line, print_report
from ..block_list import BlockLists, read_block_list
from ..convert.reencode import Resizer
from ..place import AddressPath, is_address, is_remote, local_folder, path_of, put_files, reaching
from . import failures, shard
from .failures import TEMPORARY
from .fetch import FetchSettings, require
from .part import PartDownload, find_columns, find_parts, find_removed, sample_urls
from .shard import ShardSettings, ShardTask

DISTRIBUTORS = ("multiprocessing", "pyspark", "ray")
_KILL_GRACE_SECONDS = 120
_MAX_TRIES = 21  # of a shard, each after another picture was found that ends its process
_PREFLIGHT_URL_SECONDS, _PREFLIGHT_SECONDS = 20, 300
_MIN_PREFLIGHT_URLS, _MAX_SAMPLED_PARTS = 20, 16
_MIN_FREE_BYTES = 2**30  # below this, no more shards are begun
_SPARE = 1.1


def download(
    metadata: str,  # parquet, csv, tsv, json, jsonl or txt, or folder of part_1.parquet, ...; for Spark also an address
    out: Annotated[str, {"opt": True, "required": True}],  # folder, or address, for OUT/part_1, ...; made if missing
    part_id: int = 0,  # the part to download; 0 means all
    image_size: int = 512,  # a longer short side is shrunk to it, in pixels; 0 means never
    resize_mode: str = "keep_ratio",  # or keep_ratio_largest, the long side; center_crop, border: to a square; or no
    resize_only_if_bigger: bool = True,  # by default, smaller pictures are not enlarged, cut or filled up
    upscale_interpolation: str = "lanczos",  # of pictures that are enlarged: nearest, linear, cubic, area, lanczos
    downscale_interpolation: str = "lanczos",  # of those that are shrunk; lanczos: as in training
    encode_format: str = "jpg",  # jpg, png or webp
    encode_quality: int = 95,  # of pictures that are encoded anew, 1 to 100; of png the compression, 0 to 9
    skip_reencode: bool = True,  # by default, files of --encode-format that need no resizing stay as they are
    output_format: str = "files",  # files, webdataset or parquet
    distributor: str = "multiprocessing",  # multiprocessing (this machine), pyspark or ray (a cluster)
    master: str = "",  # address of the cluster of Spark or Ray; empty means this machine
    subjob_size: int = 1000,  # shards of one Spark job; their rows wait in files, a few MB each
    processes_count: int = 16,  # shards downloaded at once
    thread_count: int = 64,  # URLs fetched at once for each shard
    number_sample_per_shard: int = 10000,  # rows of one shard
    timeout: float = 10,  # seconds of silence after which a URL is given up
    url_seconds: float = 60,  # seconds that one URL may take in all, redirects included
    shard_seconds: float = 7200,  # seconds after which a shard is closed; what it lacks then fails as "deadline"
    retries: int = 0,  # further tries of each URL, at once
    max_bytes: int = 100_000_000,  # of one picture as the server sends it
    requests_per_host: int = 16,  # URLs of one host fetched at once by each process; 0 means any number
    block_list: BlockLists = None,  # files of URLs not to fetch and sha256:HEX not to keep
    refuse_private: bool = True,  # by default, loopback, link-local and private addresses are refused
    min_image_size: int = 0,  # pictures with a shorter short side, in pixels, are left out
    max_image_area: float = inf,  # pictures of more pixels are left out, before they are decoded
    max_aspect_ratio: float = inf,  # pictures whose long side is more than this times the short one are left out
    input_format: str = "",  # of a folder's tables: csv, jsonl.gz, txt, …; by default parquet, else csv, tsv or jsonl
    url_col: str = "",  # column of the URL; by default URL, or a known other name of it
    caption_col: str = "",  # column of the caption; by default TEXT, or a known other name of it
    save_additional_columns: str = "",  # columns kept, as a,b or JSON; by default LAION's: similarity, hash, ...
    verify_hash: str = "",  # COLUMN or COLUMN,md5 (sha256, sha512): only files that have this hash are kept
    compute_hash: str = "sha256",  # md5, sha256 or sha512 of each file as it came, in a column of that name; or none
    user_agent_token: str = "",  # your name for sites that allow or forbid by name (X-Robots-Tag: NAME: noai)
    disallowed_header_directives: str = "noai,noimageai,noindex,noimageindex,noml",  # X-Robots-Tag that forbid; or none
    ignore_ssl_certificate: bool = False,  # fetch over TLS whoever answers; for sites whose certificates have expired
    preflight: int = 500,  # URLs fetched first, to see that the network is sound; 0 means none
    enable_wandb: bool = False,  # send the counts of each shard to Weights & Biases; needs wandb
    wandb_project: str = "img2dataset",  # its project there
    retry_failed: bool = False,  # try failed rows of finished shards again, into new shards
    only: str = ",".join(TEMPORARY),  # with --retry-failed: the classes of failure to try again
    ignore_disk_space: bool = False,  # go on where the sample says that the disk is too small
    redo: bool = False,  # fetch parts again that were fetched for other metadata or with other settings
    dry_run: bool = False,  # say what would be done and write nothing
    json: bool = False,  # print the report as JSON instead of a table
):
    """Download the pictures of LAION-like metadata, resumable, every row accounted for.

    JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF are taken; small JPEG files stay as they are, all else becomes JPEG, unless
    flags of img2dataset's names say otherwise.
    Stopped at any point, the same command goes on; what was fetched for other metadata, or to another size, is refused
    or, with --redo, fetched again. Rows without a picture are counted by class: dns, timeout, 4xx, ...
    """
    return run_download(SimpleNamespace(**locals()))


def run_download(flags: SimpleNamespace) -> dict:
    """Carry out `ppldm download` by its flags, print the report and return it. Raises PpldmError."""
    if flags.preflight < 0:
        raise ConfigError(f"--preflight is {flags.preflight}; it must be 0 or more")
    if flags.distributor not in DISTRIBUTORS:
        raise ConfigError(f"--distributor {flags.distributor!r} is unknown; use {' or '.join(DISTRIBUTORS)}")
    on_spark, on_ray = flags.distributor == "pyspark", flags.distributor == "ray"
    if flags.master and not (on_spark or on_ray):
        raise ConfigError("--master is only for --distributor pyspark or ray; omit it")
    require("processes-count", flags.processes_count, 1)
    require("subjob-size", flags.subjob_size, 1)
    names = flags.metadata, flags.out
    if not on_spark and (address := next(filter(is_remote, names), None)):
        raise ConfigError(f"{address} is an address, which needs --distributor pyspark; add it, or name a folder")
    master = flags.master or f"local[{flags.processes_count}]"  # unless spark-submit says where
    download = partial(_run_here, flags.processes_count)
    if on_spark or on_ray:
        download = partial(_run_on_spark, master, flags.subjob_size) if on_spark else partial(_run_on_ray, flags)
    with spark_session_if(on_spark and any(map(is_address, names)), master, DRIVER_MEMORY_GB) as spark:
        return _download_to(*(path_of(name, spark) for name in names), flags, download)  # type: ignore[call-arg]


def _download_to(metadata: Path | RemotePath, out: Path | RemotePath, flags: SimpleNamespace, download) -> dict:
    found, kept = _find_columns(metadata, flags)
    settings, retried = _make_settings(flags, kept), None
    if flags.retry_failed:
        retried = _words(flags.only)
        if not retried or not {*retried} <= {*failures.CLASSES}:
            raise ConfigError(f"--only {flags.only!r} names no class of failure; known: {', '.join(failures.CLASSES)}")
    if flags.redo and retried:
        raise ConfigError("--redo and --retry-failed are two steps; give one after the other")
    parts = [PartDownload(part, out / f"part_{part.number}", own, settings, retried, flags.redo) for part, own in found]
    if stale := [part.folder.name for part in parts if part.is_stale]:
        get_logger().info("made again: %s", ", ".join(stale))
    removed = [] if flags.part_id else find_removed(metadata, out, parts, flags.redo)
    if not flags.dry_run:
        for folder in removed:
            get_logger().info("removing %s: the metadata has no such part", folder)
            remove_dir(folder)
        with _tracking(flags) as tell:
            download_parts(parts, out, download, flags.preflight, flags.ignore_disk_space, tell)
    report = failures.merge_reports([part.report() for part in parts])

    def describe_plan(report: dict) -> str:
        num_rows = sum(part.count_rows() for part in parts)
        return f"{num_rows:,} of {report['rows']:,} rows would be fetched; nothing was written"

    print_report(report, describe_plan if flags.dry_run else failures.describe_report, flags.json)
    if not flags.dry_run and report["unfinished_shards"]:
        raise DataError(
            f"{report['unfinished_shards']} shard(s) are not finished; the messages above say why, and the same "
            "command goes on with them"
        )
    return report


def _make_settings(flags: SimpleNamespace, columns: tuple[str, ...]) -> ShardSettings:
    """Raises ConfigError."""

    def make(kind: type, **others):
        """The settings of a kind, from the flags of their names and others."""
        return kind(**{one.name: getattr(flags, one.name) for one in fields(kind) if hasattr(flags, one.name)} | others)

    forbidding = flags.disallowed_header_directives
    fetch = make(
        FetchSettings,
        user_agent_token=flags.user_agent_token or None,
        disallowed_header_directives=() if forbidding == "none" else _words(forbidding),
        check_certificates=not flags.ignore_ssl_certificate,
        blocked=read_block_list(flags.block_list),
    )
    return make(ShardSettings, fetch=fetch, resizer=make(Resizer), columns=columns)


def _find_columns(metadata: Path | RemotePath, flags: SimpleNamespace) -> tuple[list[tuple], tuple[str, ...]]:
    """Each part and its columns, and those kept, by the first part's names. Raises ConfigError where parts differ."""
    found, kept = [], ()
    for part in find_parts(metadata, flags.part_id, flags.input_format):
        named = map(_words, (flags.save_additional_columns, flags.verify_hash))
        own = find_columns(part.path, flags.url_col, flags.caption_col, *named)
        kept = kept if found else tuple(own.kept)
        columns = own.under_names(kept)
        if columns is None:
            raise ConfigError(
                f"{part.path} has {', '.join(own.kept)} and {found[0][0].path} {', '.join(kept)}; "
                "name those that all have with --save-additional-columns, or download part by part"
            )
        found.append((part, columns))
    return found, kept


def _words(text: str) -> tuple[str, ...]:
    """Those of a list, as `a,b` or as img2dataset takes it, `["a","b"]`."""
    words = (word.strip(" \t\n\"'") for word in text.strip().removeprefix("[").removesuffix("]").split(","))
    return tuple(word for word in words if word)


def download_shard_at(task: ShardTask, settings: ShardSettings, hadoop: str) -> dict:
    """`shard.download_shard` to an address; `hadoop` are the settings of the file systems."""
    with reaching(hadoop) as client, local_folder(task.part_folder.parent) as folder:
        part, rows_file = task.part_folder.at(client), task.rows_file.at(client)
        local = replace(task, part_folder=folder / part.name, rows_file=folder / rows_file.name)
        rows_file.fetch(local.rows_file)
        record = shard.download_shard(local, settings)
        put_shard(local.part_folder, part, task.number)
        rows_file.remove()
    return record


def put_shard(folder: Path, part: AddressPath, number: int) -> None:
    """Copy a finished shard from a part's folder here to that at an address, in place of what there is of it."""
    files = {piece: part / piece.name for piece in shard.find_pieces(folder, number)}
    files |= {find(folder, number): find(part, number) for find in (shard.record_path, shard.stats_path)}
    put_files(files, [*shard.find_pieces(part, number), shard.record_path(part, number)], shard.work_folder(part))


def _run_here(num_processes: int, part: PartDownload, tasks: Iterator[ShardTask], num_rows: int) -> Iterator[tuple]:
    """(task, its record or error, URLs of pictures that ended its process) of shards, in processes of this machine."""
    counter = multiprocessing.get_context("spawn").Value("q", 0)
    work = partial(shard.download_shard, settings=part.settings, on_fetch=partial(_add_one, counter))
    seconds = part.settings.shard_seconds + part.settings.fetch.url_seconds + _KILL_GRACE_SECONDS
    with following(lambda: (counter.value, num_rows), desc=part.folder.name, unit="url"):
        for task, result in map_with_deadline(work, tasks, num_processes, seconds):
            has_ended = isinstance(result, DataError)  # its process, which may have been over a picture
            yield task, result, shard.find_blamed(task, part.settings) if has_ended else ()


def _add_one(counter) -> None:
    with counter.get_lock():
        counter.value += 1


def _run_on_spark(
    master: str, num_at_once: int, part: PartDownload, tasks: Iterator[ShardTask], num_rows: int
) -> Iterator[tuple]:
    """As `_run_here`, on Spark, which tells of no pictures."""
    download = partial(shard.download_shard, settings=part.settings)
    if isinstance(part.folder, AddressPath):
        download = partial(download_shard_at, settings=part.settings, hadoop=part.folder.hadoop.settings())
    with spark_session(master, DRIVER_MEMORY_GB) as spark:
        if spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
            raise ConfigError(
                "Spark may take executors away in the middle of a download (spark.dynamicAllocation.enabled): it "
                "would stop early or never end; set that to false"
            )
        while batch := list(islice(tasks, num_at_once)):
            done = run_tasks(spark, part.folder.name, batch, download, is_lenient=True)
            yield from ((task, result, ()) for task, result in done)


def _run_on_ray(flags, part: PartDownload, tasks: Iterator[ShardTask], num_rows: int) -> Iterator[tuple]:
    """As `_run_on_spark`, on Ray: a shard for each of its processors at a time."""
    try:
        import ray
    except ImportError as error:
        raise EnvironmentProblem(f"ray cannot be imported ({error}); pip install ray") from error
    here = {} if flags.master else {"num_cpus": flags.processes_count, "include_dashboard": False}
    ray.init(flags.master or "local", log_to_driver=False, **here)
    try:
        fetch, running = ray.remote(max_retries=0)(attempt), {}
        work, at_once = partial(shard.download_shard, settings=part.settings), int(ray.cluster_resources()["CPU"])
        with progress(total=num_rows, desc=part.folder.name, unit="url") as bar:
            while True:
                running |= {fetch.remote(work, task): task for task in islice(tasks, at_once - len(running))}
                if not running:
                    return
                [done], _ = ray.wait([*running])
                task = running.pop(done)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayError as error:
                    result = DataError(f"Ray lost it: {one_line(str(error), 300)}")
                bar.update(task.num_rows)
                yield task, result, ()
    finally:
        ray.shutdown()


@contextmanager
def _tracking(flags: SimpleNamespace) -> Iterator[Callable[[ShardTask], None]]:
    """What is called for each shard that is finished: with `--enable-wandb`, img2dataset's own loggers send its counts,
    and those of all so far, to a run of Weights & Biases; WANDB_MODE and the like are heeded."""
    if not flags.enable_wandb or flags.dry_run:
        yield lambda task: None
        return
    try:
        import wandb  # before img2dataset, which then has it
    except ImportError as error:
        raise EnvironmentProblem(
            f"--enable-wandb needs wandb, which cannot be imported ({error}); pip install 'wandb>=0.17,<1'"
        ) from error
    logger = shard.import_img2dataset().logger
    total, table = logger.SpeedLogger("total", enable_wandb=True), logger.StatusTableLogger(enable_wandb=True)
    statuses = logger.CappedCounter()

    def tell(task: ShardTask) -> None:
        stats = loads(shard.stats_path(task.part_folder, task.number).read_text(encoding="utf-8"))
        counts = [stats[name] for name in ("count", "successes", "failed_to_download", "failed_to_resize")]
        statuses.update(logger.CappedCounter.load(stats["status_dict"]))
        with redirect_stdout(sys.stderr):
            for speed in (logger.SpeedLogger("worker", enable_wandb=True), total):
                speed(*counts, stats["start_time"], stats["end_time"])
        table(statuses, total.count)

    try:
        run = wandb.init(project=flags.wandb_project, config=vars(flags))
    except wandb.Error as error:
        raise EnvironmentProblem(f"wandb: {one_line(str(error), 300)}; `wandb login`, or WANDB_MODE=offline") from error
    try:
        yield tell
    finally:
        table.sync()
        run.finish()


def download_parts(
    parts: Sequence[PartDownload],
    out,
    download: Callable,
    num_sampled: int,
    ignore_disk_space: bool,
    tell: Callable[[ShardTask], None],
) -> None:
    """Download what is not done, by `_run_here` or its likes; `tell` is called with each finished shard. Raises
    PpldmError where that makes no sense."""
    todo = [part for part in parts if part.count_rows()]
    for part in parts:
        if part not in todo and part.job.is_new(*part.plan):
            with part.claimed():
                pass
    if not todo:
        return
    num_bytes = _SPARE * _check_network(todo, num_sampled) if num_sampled else 0
    make_output_dir(out)
    if not ignore_disk_space and num_bytes > (free := count_free_bytes(out)):
        raise OutputError(
            f"about {num_bytes / 1e9:,.1f} GB are needed and {out} has {free / 1e9:,.1f} GB free; choose a larger disk "
            "for --out, download part by part (--part-id), or go on all the same with --ignore-disk-space"
        )

    def begin(part: PartDownload) -> Iterator[ShardTask]:
        for task in part.tasks():
            if count_free_bytes(part.folder) < _MIN_FREE_BYTES:
                raise OutputError(f"the disk of {part.folder} is nearly full; make room, and the same command goes on")
            yield task

    for part in todo:
        with part.claimed():
            tasks, num_rows, known = begin(part), part.count_rows(), -1
            for _ in range(_MAX_TRIES):
                failed, num_blamed = _try_shards(download(part, tasks, num_rows), tell)
                # Whoever finds no other picture to blame than the try before has no more to try.
                if not failed or num_blamed == known:
                    break
                get_logger().warning("%s: %d shard(s) are tried once more", part.folder, len(failed))
                tasks, num_rows, known = iter(failed), sum(task.num_rows for task in failed), num_blamed
            report = part.report()
            write_json(part.folder / ".download" / "report.json", report)
        get_logger().info("%s: %s", part.folder, failures.describe_rows(report))


def _try_shards(results: Iterable[tuple], tell: Callable) -> tuple[list[ShardTask], int]:
    """The tasks left, and how many pictures ended their processes. Raises PpldmError where none can be finished."""
    failed, num_blamed = [], 0
    for task, result, urls in results:
        if isinstance(result, EnvironmentProblem | OutputError | ConfigError):
            raise result
        if isinstance(result, PpldmError):
            num_blamed += len(urls)
            listed = ", ".join(map(failures.without_password, sorted(urls)))
            told = f"{result}; left out from now on: {listed}" if urls else result
            get_logger().warning("shard %d of %s: %s", task.number, task.part_folder, told)
            failed.append(task)
        else:
            tell(task)
    return failed, num_blamed


def _check_network(todo: Sequence[PartDownload], num_urls: int) -> float:
    """How many bytes the pictures of all rows will take, by a sample of them. Raises EnvironmentProblem."""
    num_rows, settings = sum(part.count_rows() for part in todo), todo[0].settings
    num_urls = min(num_urls, max(_MIN_PREFLIGHT_URLS, num_rows // 20))
    sampled = todo[:_MAX_SAMPLED_PARTS]
    urls = [url for item in sampled for url in sample_urls(item.part, item.columns.url, -(-num_urls // len(sampled)))]
    get_logger().info("fetching %d URLs of the metadata to see whether the network is sound", len(urls))
    brief = replace(settings.fetch, url_seconds=min(settings.fetch.url_seconds, _PREFLIGHT_URL_SECONDS))
    fetch = partial(shard.fetch_samples, settings=replace(settings, fetch=brief), seconds=_PREFLIGHT_SECONDS)
    [(_, samples)] = map_with_deadline(fetch, [urls], 1, _PREFLIGHT_SECONDS + _KILL_GRACE_SECONDS)
    if isinstance(samples, DataError):  # its process was ended, as a shard's may be
        get_logger().warning("how much room the pictures need is not known: %s", samples)
        return 0.0
    if isinstance(samples, PpldmError):
        raise samples
    outcomes = [outcome for outcome, _ in samples]
    if fault := failures.find_network_fault(outcomes, ask_again=True):
        raise EnvironmentProblem(f"{fault}; nothing was marked complete, and the same command goes on")
    failed = Counter(outcome.name for outcome in outcomes)
    num_good = failed.pop("success", 0)
    num_bytes = sum(size for _, size in samples)
    lines = [
        f"{num_good} of them are pictures, {num_bytes / 1e3 / max(num_good, 1):.0f} KB each as kept",
        *failures.describe_failures(failed, len(samples), {}),
    ]
    get_logger().info("%s", "\n".join(lines))
    return num_rows * num_bytes / max(len(samples), 1)
