"""`ppldm dedup`: which pictures of filelists are copies of which, and which one of each is to be kept.

Nothing is deleted. Rows = kept + duplicates + unusable, by reason.

    OUT/labels.parquet, duplicates.jsonl    `labels`
    OUT/report.json                         counts
    OUT/histogram.png, sheet.png            how large clusters are and how near; some of them, to look at
    OUT/hashes/                             `hash_files`: another --bits or --keep decodes nothing again
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Annotated

import numpy as np

from ...data.formats.layouts import DEFAULT_LAYOUT
from ...utils.errors import ConfigError, DataError
from ...utils.files import local_path, lock_folder, make_output_dir, write_json
from ...utils.machine.resources import usable_memory_bytes
from ...utils.machine.spark import is_submitted, spark_session
from ...utils.processes.workers import check_workers
from ...utils.report import print_report
from ..parts import Indexed, Span, describe_bad_parts, index_parts, list_parts, over_rows

_DEFAULT_BITS = 6
_PAIRS_AT_ONCE = 2048


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


@dataclass(frozen=True)
class Looked:
    """What counts as a copy, `bits` being -1 for equal files only, and where it is looked for; with a folder of
    `embeddings`, by these alone."""

    bits: int = _DEFAULT_BITS
    mirrored: bool = False
    crops: bool = True
    master: str | None = None
    memory_gb: float = 2.0
    embeddings: Path | None = None
    least_similarity: float = 0.95

    @property
    def unit(self) -> str:
        """Of distances."""
        return "hundredths of 1 - similarity" if self.embeddings else "bits"


def find_duplicates(indexed: Indexed, out: Path, rules: list[str], looked: Looked, num_workers: int = 1) -> dict:
    """Write what the module says into the folder `out`; return the report. Raises DataError, OutputError."""
    from .labels import make_labels, write_labels
    from .sheet import draw_histogram, draw_sheet
    from .stars import make_nodes, rank_rows

    spans = _hash_rows(indexed, out, num_workers)
    columns, skipped = _load(spans)
    ranked = rank_rows(rules, columns["pixels"], columns["caption_chars"])
    nodes = make_nodes(ranked, columns["usable"], columns["digest"])
    if looked.embeddings:
        from .embeddings import find_stars, read_embeddings

        found = read_embeddings(looked.embeddings, indexed)
        columns["near"] = columns["usable"] & found.any(axis=1)
        (star, distance), counts = find_stars(found[nodes.rows], looked.least_similarity), {}
    else:
        star, distance, counts = _find_near(spans, nodes, columns["near"], out, looked)
    labels = make_labels(nodes.of_rows, nodes.rows, star, distance, columns["digest"])
    write_labels(out, spans, labels)
    dropped = labels.dropped
    sizes = Counter(labels.copies[(labels.copies > 1) & ~dropped].tolist())
    distances = Counter(labels.distance[dropped & ~labels.same_file].tolist())
    report = {
        "rows": indexed.num_rows,
        "kept": int(columns["usable"].sum() - dropped.sum()),
        "duplicates": int(dropped.sum()),
        "of_the_same_file": int((dropped & labels.same_file).sum()),
        "skipped": dict(skipped.most_common()),
        "clusters": sizes.total(),
        "cluster_sizes": dict(sorted(sizes.items())),
        "distances": dict(sorted(distances.items())),
        "without_structure": int((columns["usable"] & ~columns["near"]).sum()),
        **counts,
        "bad_parts": indexed.bad_parts(),
    }
    draw_histogram(out / "histogram.png", sizes, distances, looked.unit)
    draw_sheet(out / "sheet.png", [span for span, _ in spans], labels, looked.unit)
    write_json(out / "report.json", report)
    return report


def _find_near(spans, nodes, near: np.ndarray, out: Path, looked: Looked) -> tuple[np.ndarray, np.ndarray, dict]:
    """(star, distance) of nodes, as `choose_stars` has them, by the hashes of the rows that `near` marks; and what the
    report says of it."""
    from .stars import choose_stars, count_chains

    is_best = np.zeros(len(near), bool)
    is_best[nodes.rows] = near[nodes.rows]
    better, worse, bits, cut = _compare(spans, nodes.of_rows, is_best, out, looked)
    alike = _look(spans, nodes, better, worse, looked)
    better, worse, bits = better[alike], worse[alike], bits[alike]
    star, distance = choose_stars(len(nodes.rows), better, worse, bits)
    strangers = int((~alike).sum())
    counts = {"chains": count_chains(star, better, worse), "strangers_with_near_hashes": strangers}
    return star, distance, counts | {"comparisons_cut_short": cut}


def _hash_rows(indexed: Indexed, out: Path, num_workers: int) -> list[tuple[Span, Path]]:
    """All spans in the order of their rows, with the files of their hashes."""
    from .hash_files import hash_span

    folder = make_output_dir(out / "hashes")
    order = {part: number for number, part in enumerate(indexed.rows)}
    found = over_rows(partial(hash_span, folder=folder), indexed, num_workers, "hashing")
    return sorted(found, key=lambda one: (order[one[0].part], one[0].start))


def _load(spans: list[tuple[Span, Path]]) -> tuple[dict[str, np.ndarray], Counter]:
    """What is known of each row, [rows], 22 bytes of each; and why some cannot be used."""
    from .hash_files import read_digests, read_hashes

    num_rows = sum(span.stop - span.start for span, _ in spans)
    dtypes = {"pixels": np.int64, "caption_chars": np.int32}
    columns = {name: np.zeros(num_rows, dtype) for name, dtype in dtypes.items()}
    columns |= {"digest": np.zeros(num_rows, np.uint64), "usable": np.zeros(num_rows, bool)}
    columns["near"] = np.zeros(num_rows, bool)
    skipped, start = Counter(), 0
    for span, path in spans:
        table = read_hashes(path, (*dtypes, "hash", "sha256", "reason"))
        own = slice(start, start + span.stop - span.start)
        for name in dtypes:
            columns[name][own] = table[name].fill_null(0).to_numpy()
        columns["digest"][own] = read_digests(table)
        columns["usable"][own] = table["reason"].is_null().to_numpy()
        columns["near"][own] = table["hash"].is_valid().to_numpy()
        skipped.update(table["reason"].drop_null().to_pylist())
        start = own.stop
    return columns, skipped


def _compare(spans, of_rows, is_best, out: Path, looked: Looked) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """`pairs.find_pairs` of the nodes of the rows that `is_best` marks."""
    from .pairs import duckdb_engine, find_pairs, spark_engine

    num_near = int(is_best.sum())
    if looked.bits < 0 or num_near < 2:
        nothing = np.zeros(0, np.int32)
        return nothing, nothing, nothing.astype(np.int8), 0
    folder = make_output_dir(out / ".comparing")
    try:
        path = _write_nodes(folder / "nodes.parquet", spans, of_rows, is_best)
        how = num_near, looked.bits, looked.mirrored, looked.crops
        if looked.master or is_submitted():
            with spark_session(looked.master, looked.memory_gb) as spark:
                return find_pairs(spark_engine(spark, path), *how)
        with duckdb_engine(path, looked.memory_gb) as engine:
            return find_pairs(engine, *how)
    finally:
        rmtree(folder, ignore_errors=True)


def _look(spans, nodes, better: np.ndarray, worse: np.ndarray, looked: Looked) -> np.ndarray:
    """bool [pairs]: whether the pictures of near nodes look alike."""
    from .hash_files import read_hashes
    from .hashes import THUMBNAIL_SIDE, look_alike

    wanted = np.zeros(len(nodes.of_rows), bool)
    wanted[nodes.rows[np.union1d(better, worse)]] = True
    place = np.full(len(nodes.rows), -1)
    thumbnails = np.empty((int(wanted.sum()), THUMBNAIL_SIDE, THUMBNAIL_SIDE, 3), np.uint8)
    start = taken = 0
    for span, path in spans:
        stop = start + span.stop - span.start
        chosen = np.flatnonzero(wanted[start:stop])
        if len(chosen):
            found = read_hashes(path, ("thumbnail",))["thumbnail"].take(chosen).to_pylist()
            thumbnails[taken : taken + len(chosen)] = np.frombuffer(b"".join(found), np.uint8).reshape(
                -1, *thumbnails.shape[1:]
            )
            place[nodes.of_rows[start:stop][chosen]] = np.arange(taken, taken + len(chosen))
            taken += len(chosen)
        start = stop
    alike = np.zeros(len(better), bool)
    for first in range(0, len(better), _PAIRS_AT_ONCE):
        own = slice(first, first + _PAIRS_AT_ONCE)
        one, other = thumbnails[place[better[own]]], thumbnails[place[worse[own]]]
        alike[own] = look_alike(one, other, looked.mirrored, looked.crops)
    return alike


def _write_nodes(path: Path, spans: list[tuple[Span, Path]], of_rows: np.ndarray, is_best: np.ndarray) -> Path:
    """The hashes of the rows that `is_best` marks, as `pairs` takes them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from .hash_files import read_hashes
    from .hashes import NUM_CROPS

    names = ["hash", "mirrored"]
    fields = [*names, *map("crop_{}".format, range(NUM_CROPS))]
    schema = pa.schema({"node": pa.int32()} | dict.fromkeys(fields, pa.int64()))
    start = 0
    with pq.ParquetWriter(path, schema) as writer:
        for span, file in spans:
            stop = start + span.stop - span.start
            chosen = np.flatnonzero(is_best[start:stop])
            if len(chosen):
                table = read_hashes(file, (*names, "crops")).take(chosen)
                crops = table["crops"].combine_chunks().flatten().to_numpy().reshape(-1, NUM_CROPS)
                columns = [pa.array(of_rows[start:stop][chosen]), *(table[name].combine_chunks() for name in names)]
                writer.write_table(pa.table([*columns, *map(pa.array, crops.T)], schema=schema))
            start = stop
    return path


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
