"""`ppldm download`: the pictures of parquet metadata, by img2dataset, one part or all.

Before the first shard a sample of the URLs is fetched: where the network fails, the command stops, says what to mend,
and nothing is marked complete. See `shard` and `part` for what holds of the result.
"""

from dataclasses import fields
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from ...utils.errors import ConfigError, DataError
from ...utils.files import RemotePath, remove_dir
from ...utils.log import get_logger
from ...utils.machine.spark import spark_session_if
from ...utils.report import print_report
from ..block_list import BlockLists, read_block_list
from ..place import is_address, is_remote, path_of
from .failures import CLASSES, TEMPORARY, describe_report, merge_reports


def download(
    metadata: str,  # parquet file, or folder of part_1.parquet, ...; for Spark also an address such as hdfs://name/x
    out: Annotated[str, {"opt": True, "required": True}],  # folder, or address, for OUT/part_1, ...; made if missing
    part_id: int = 0,  # the part to download; 0 means all
    image_size: int = 512,  # a longer short side is shrunk to it, in pixels; 0 means never. None is enlarged or padded
    encode_quality: int = 95,  # of pictures that are shrunk or are not JPEG; all others stay as they are
    output_format: str = "files",  # files, webdataset or parquet
    distributor: str = "multiprocessing",  # multiprocessing (this machine) or pyspark (a cluster)
    master: str = "",  # address of the Spark cluster, with --distributor pyspark; empty means this machine
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
    url_col: str = "",  # column of the URL; by default URL, or a known other name of it
    caption_col: str = "",  # column of the caption; by default TEXT, or a known other name of it
    save_additional_columns: str = "",  # columns kept, a comma between; by default LAION's: similarity, hash, ...
    user_agent_token: str = "",  # your name for sites that allow or forbid by name (X-Robots-Tag: NAME: noai)
    disallowed_header_directives: str = "noai,noimageai,noindex,noimageindex,noml",  # X-Robots-Tag that forbid; or none
    ignore_ssl_certificate: bool = False,  # fetch over TLS whoever answers; for sites whose certificates have expired
    preflight: int = 500,  # URLs fetched first, to see that the network is sound; 0 means none
    retry_failed: bool = False,  # try failed rows of finished shards again, into new shards
    only: str = ",".join(TEMPORARY),  # with --retry-failed: the classes of failure to try again
    ignore_disk_space: bool = False,  # go on where the sample says that the disk is too small
    redo: bool = False,  # fetch parts again that were fetched for other metadata or with other settings
    dry_run: bool = False,  # say what would be done and write nothing
    json: bool = False,  # print the report as JSON instead of a table
):
    """Download the pictures of LAION-like metadata, resumable, every row accounted for.

    JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF are taken; small JPEG files stay as they are, all else becomes JPEG.
    Stopped at any point, the same command goes on; what was fetched for other metadata, or to another size, is refused
    or, with --redo, fetched again. Rows without a picture are counted by class: dns, timeout, 4xx, ...
    """
    flags = SimpleNamespace(**locals())
    from .run import DRIVER_MEMORY_GB, Runner

    if preflight < 0:
        raise ConfigError(f"--preflight is {preflight}; it must be 0 or more")
    names = metadata, out
    runner = Runner(distributor, master, processes_count)
    on_spark = distributor == "pyspark"
    if not on_spark and (address := next(filter(is_remote, names), None)):
        raise ConfigError(f"{address} is an address, which needs --distributor pyspark; add it, or name a folder")
    with spark_session_if(on_spark and any(map(is_address, names)), runner.spark_master, DRIVER_MEMORY_GB) as spark:
        return _download_to(*(path_of(name, spark) for name in names), flags, runner)  # type: ignore[call-arg]


def _download_to(metadata: Path | RemotePath, out: Path | RemotePath, flags: SimpleNamespace, runner) -> dict:
    from .part import PartDownload, find_removed
    from .run import download_parts

    found, kept = _find_columns(metadata, flags)
    settings, retried = _make_settings(flags, kept), _retry_classes(flags.only) if flags.retry_failed else None
    if flags.redo and retried:
        raise ConfigError("--redo and --retry-failed are two steps; give one after the other")
    parts = [
        PartDownload(part, out / f"part_{part.number}", columns, settings, retried, flags.redo)
        for part, columns in found
    ]
    if stale := [part.folder.name for part in parts if part.is_stale]:
        get_logger().info("made again: %s", ", ".join(stale))
    removed = [] if flags.part_id else find_removed(metadata, out, parts, flags.redo)
    if not flags.dry_run:
        for folder in removed:
            get_logger().info("removing %s: the metadata has no such part", folder)
            remove_dir(folder)
        download_parts(parts, out, runner, flags.preflight, flags.ignore_disk_space)
    report = merge_reports([part.report() for part in parts])
    print_report(report, partial(_describe_plan, parts) if flags.dry_run else describe_report, flags.json)
    if not flags.dry_run and report["unfinished_shards"]:
        raise DataError(
            f"{report['unfinished_shards']} shard(s) are not finished; the messages above say why, and the same "
            "command goes on with them"
        )
    return report


def _make_settings(flags: SimpleNamespace, columns: tuple[str, ...]):
    """The ShardSettings of flags. Raises ConfigError."""
    from .fetch import FetchSettings
    from .resize import Resizer
    from .shard import ShardSettings

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


def _describe_plan(parts: list, report: dict) -> str:
    num_rows = sum(part.count_rows() for part in parts)
    return f"{num_rows:,} of {report['rows']:,} rows would be fetched; nothing was written"


def _find_columns(metadata: Path | RemotePath, flags: SimpleNamespace) -> tuple[list[tuple], tuple[str, ...]]:
    """Each part and its columns, and the columns kept, under the names of the first part. Raises ConfigError where
    parts have different columns."""
    from .part import find_columns, find_parts

    found, kept = [], ()
    for part in find_parts(metadata, flags.part_id):
        own = find_columns(part.path, flags.url_col, flags.caption_col, _words(flags.save_additional_columns))
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
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _retry_classes(only: str) -> tuple[str, ...]:
    classes = _words(only)
    unknown = [name for name in classes if name not in CLASSES]
    if unknown or not classes:
        raise ConfigError(f"--only {only!r} names no class of failure; known: {', '.join(CLASSES)}")
    return classes
