"""`ppldm dedup`: which pictures of filelists are copies of which, and which one of each is to be kept.

Nothing is deleted. Rows = kept + duplicates + unusable, by reason.

    OUT/labels.parquet, duplicates.jsonl    `stars`
    OUT/report.json                         counts
    OUT/histogram.png, sheet.png            how large clusters are and how near; some of them, to look at
    OUT/hashes/                             `hashes`: another --bits or --keep decodes nothing again
"""

from functools import partial
from pathlib import Path
from typing import Annotated

from ...data.formats.layouts import DEFAULT_LAYOUT
from ...utils.errors import ConfigError, DataError
from ...utils.files import local_path, lock_folder, make_output_dir
from ...utils.machine.resources import usable_memory_bytes
from ...utils.processes.workers import check_workers
from ...utils.report import print_report
from ..parts import describe_bad_parts, index_parts, list_parts

_DEFAULT_BITS = 6


def dedup(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    out: Annotated[str, {"opt": True, "required": True}],  # folder for labels, pictures and hashes; made if missing
    bits: int = _DEFAULT_BITS,  # of 64, in which the hashes of copies differ at most, 0 to 16; more find more, slower
    exact: bool = False,  # only files that are equal byte for byte
    embeddings: str = "",  # folder of `ppldm embed`: copies are what a network takes for alike; instead of hashes
    least_similarity: float = 0.95,  # with --embeddings: cosine of copies at least, between 0 and 1
    mirrored: bool = False,  # mirrored pictures are copies too
    no_crops: bool = False,  # do not look for pictures that lack up to 5 % of the sides; several times as fast
    keep: str = "largest,longest_caption,first",  # of copies, keep the best by these rules, the first that decides
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    num_workers: int = 0,  # processes that read pictures; 0 means one per core
    memory_gb: float = 0.0,  # memory of the engine that compares; 0 means half of what there is
    master: str = None,  # compare on a Spark cluster, such as spark://host:7077, that sees OUT; default: DuckDB, here
    json: bool = False,  # print the report as JSON
):
    """Find pictures that are there more than once: the same file, resized, compressed again or cropped.

    Writes which rows are copies, and which of them is the best, and deletes nothing: `ppldm forget --entries
    OUT/duplicates.jsonl` takes copies out of converted parts. Pictures are read once: stopped, the same command goes
    on, and other bits and rules take only the comparing again.
    """
    from .find import Looked, find_duplicates
    from .pairs import MAX_BITS
    from .stars import parse_keep

    if not 0 <= bits <= MAX_BITS:
        raise ConfigError(f"--bits is {bits}; it must be 0 to {MAX_BITS}, since more make strangers alike")
    if embeddings and (exact or mirrored or no_crops or bits != _DEFAULT_BITS or master):
        raise ConfigError(
            "--embeddings takes the place of hashes; omit --exact, --bits, --mirrored, --no-crops, --master"
        )
    if not 0 < least_similarity < 1:
        raise ConfigError(f"--least-similarity is {least_similarity}; it must be between 0 and 1, as 0.95")
    rules = parse_keep(keep)
    folder = make_output_dir(local_path(out))
    num_workers = check_workers(num_workers)
    indexed = index_parts(list_parts(filelists, layout), num_workers)
    if not indexed.num_rows:
        raise DataError(f"{filelists[0]} has no rows to compare; name filelists with rows")
    memory_gb = memory_gb or max(0.5, (usable_memory_bytes() or 4e9) / 2e9)
    network = local_path(embeddings) if embeddings else None
    looked_for = Looked(-1 if exact else bits, mirrored, not no_crops, master, memory_gb, network, least_similarity)
    lock = lock_folder(folder)
    try:
        report = find_duplicates(indexed, folder, rules, looked_for, num_workers)
    finally:
        lock.close()
    print_report(report, partial(describe, out=folder), json)


def describe(report: dict, out: Path) -> str:
    """A report as text."""
    lines = [
        f"{report['rows']:,} rows: {report['kept']:,} kept, {report['duplicates']:,} copies of them "
        f"({report['of_the_same_file']:,} the same file) in {report['clusters']:,} clusters"
    ]
    lines += [f"  cannot be used, {reason}: {count:,}" for reason, count in report["skipped"].items()]
    if report["without_structure"]:
        lines.append(f"  without a hash or an embedding, compared by their bytes: {report['without_structure']:,}")
    if report.get("chains"):
        lines.append(f"  chains of pictures whose ends are not alike; several of each are kept: {report['chains']:,}")
    if report.get("comparisons_cut_short"):
        lines.append(f"  compared with the best of their group only: {report['comparisons_cut_short']:,} hashes")
    lines += describe_bad_parts(report["bad_parts"])
    look = f"look at {out / 'sheet.png'}; " if report["clusters"] else ""
    return "\n".join([*lines, f"{look}labels are in {out / 'labels.parquet'}"])
