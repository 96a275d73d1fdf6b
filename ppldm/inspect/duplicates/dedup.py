"""`ppldm dedup`: which pictures of filelists are copies of which, and which one of each is to be kept.

Nothing is deleted. Rows = kept + duplicates + unusable, by reason.

    OUT/labels.parquet, duplicates.jsonl    `stars`
    OUT/report.json                         counts
    OUT/histogram.png, sheet.png            how large clusters are and how near; some of them, to look at
    OUT/hashes/                             `hashes`: another --bits or --keep decodes nothing again

Pairs of 64-bit hashes within k bits are found by queries that DuckDB and Spark answer alike. Cut into m > k bands, two
hashes that differ in k bits are the same in at least m - k bands. So for each choice of m - k bands, the hashes that
are the same there are compared, and no pair is missed (Manku, Jain and Das Sarma 2007, "Detecting Near-Duplicates for
Web Crawling"). m is chosen by the number of hashes, so that few are compared in vain. Of pictures that share bands in
their thousands, such as logos on white, all are compared with the best GROUP_LIMIT only; the others are counted.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations
from pathlib import Path
from shutil import rmtree
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ...data.formats.layouts import DEFAULT_LAYOUT
from ...utils.errors import ConfigError, DataError, OutputError
from ...utils.files import atomic_write, local_path, lock_folder, make_output_dir, write_json
from ...utils.log import progress
from ...utils.machine.duckdb import connect, execute, load_duckdb, parquet_sql
from ...utils.machine.resources import usable_memory_bytes
from ...utils.machine.spark import escape_glob, is_submitted, spark_session
from ...utils.pictures import pad_alike, prompt_grid, save_png
from ...utils.processes.workers import check_workers
from ...utils.text import print_report
from ..parts import Indexed, describe_bad_parts, index_parts, list_parts, over_rows
from ..show import read_tile
from . import stars
from .hashes import NUM_CROPS, THUMBNAIL_SIDE, Hashed, hash_span, look_alike

_DEFAULT_BITS = 6
_PAIRS_AT_ONCE = 2048
_CLUSTERS, _OF_EACH, _SIDE = 12, 5, 128  # of the sheet
GROUP_LIMIT = 200  # hashes of equal bands that all others are compared with
MAX_BITS = 16  # of 64, beyond which strangers are alike
_HASH_BITS = 64
_COMPARISON_COST = 4  # of two hashes, in times of what it costs to put one into a table
Engine = Callable[[str], pa.Table]  # answers a query over the table `nodes`


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
    if not 0 <= bits <= MAX_BITS:
        raise ConfigError(f"--bits is {bits}; it must be 0 to {MAX_BITS}, since more make strangers alike")
    if embeddings and (exact or mirrored or no_crops or bits != _DEFAULT_BITS or master):
        raise ConfigError(
            "--embeddings takes the place of hashes; omit --exact, --bits, --mirrored, --no-crops, --master"
        )
    if not 0 < least_similarity < 1:
        raise ConfigError(f"--least-similarity is {least_similarity}; it must be between 0 and 1, as 0.95")
    rules = stars.parse_keep(keep)
    folder = make_output_dir(local_path(out))
    num_workers = check_workers(num_workers)
    indexed = index_parts(list_parts(filelists, layout), num_workers)
    if not indexed.num_rows:
        raise DataError(f"{filelists[0]} has no rows to compare; name filelists with rows")
    memory_gb = memory_gb or max(0.5, (usable_memory_bytes() or 4e9) / 2e9)
    network = local_path(embeddings) if embeddings else None
    looked_for = Looked(-1 if exact else bits, mirrored, not no_crops, master, memory_gb, network, least_similarity)
    with closing(lock_folder(folder)):
        report = find_duplicates(indexed, folder, rules, looked_for, num_workers)
    print_report(report, partial(describe, out=folder), json)


def describe(report: dict, out: Path) -> str:
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


@dataclass(frozen=True)
class Looked:
    """What counts as a copy, and where it is looked for. `bits`: -1 for equal files only. `embeddings`: instead."""

    bits: int = 6
    mirrored: bool = False
    crops: bool = True
    master: str | None = None
    memory_gb: float = 2.0
    embeddings: Path | None = None
    least_similarity: float = 0.95


def find_duplicates(indexed: Indexed, out: Path, rules: list[str], looked: Looked, num_workers: int = 1) -> dict:
    """Write what `ppldm dedup` says into the folder `out`; return the report. Raises DataError, OutputError."""
    folder = make_output_dir(out / "hashes")
    firsts = dict(zip(indexed.rows, accumulate(indexed.rows.values(), initial=0), strict=False))
    spans = over_rows(partial(hash_span, folder=folder), indexed, num_workers, "hashing")
    found = (Hashed(one, path, slice(firsts[one.part] + one.start, firsts[one.part] + one.stop)) for one, path in spans)
    hashed = sorted(found, key=lambda one: one.rows.start)
    columns, skipped = _load(hashed)
    ranked = stars.rank_rows(rules, columns["pixels"], columns["caption_chars"])
    nodes = stars.make_nodes(ranked, columns["usable"], columns["digest"])
    if looked.embeddings:
        embeddings = stars.read_embeddings(looked.embeddings, indexed)
        columns["near"] = columns["usable"] & embeddings.any(axis=1)
        (star, distance), counts = stars.find_stars(embeddings[nodes.rows], looked.least_similarity), {}
    else:
        star, distance, counts = _find_near(hashed, nodes, columns["near"], out, looked)
    labels = stars.make_labels(nodes.of_rows, nodes.rows, star, distance, columns["digest"])
    stars.write_labels(out, hashed, labels)
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
    unit = "hundredths of 1 - similarity" if looked.embeddings else "bits"  # of distances
    draw_histogram(out / "histogram.png", sizes, distances, unit)
    draw_sheet(out / "sheet.png", indexed, labels, unit)
    write_json(out / "report.json", report)
    return report


def _find_near(
    hashed: list[Hashed], nodes: stars.Nodes, near: np.ndarray, out: Path, looked: Looked
) -> tuple[np.ndarray, np.ndarray, dict]:
    """(star, distance) of nodes, by the hashes of the rows that `near` marks; and what the report says of it."""
    is_best = np.zeros(len(near), bool)
    is_best[nodes.rows] = near[nodes.rows]
    better = worse = np.zeros(0, np.int32)
    bits, cut, num_near = np.zeros(0, np.int8), 0, int(is_best.sum())
    if looked.bits >= 0 and num_near > 1:
        folder, how = make_output_dir(out / ".comparing"), (num_near, looked.bits, looked.mirrored, looked.crops)
        try:
            path = _write_nodes(folder / "nodes.parquet", hashed, nodes.of_rows, is_best)
            if looked.master or is_submitted():
                with spark_session(looked.master, looked.memory_gb) as spark:
                    better, worse, bits, cut = find_pairs(spark_engine(spark, path), *how)
            else:
                with duckdb_engine(path, looked.memory_gb) as engine:
                    better, worse, bits, cut = find_pairs(engine, *how)
        finally:
            rmtree(folder, ignore_errors=True)
    alike = _look(hashed, nodes, better, worse, looked)
    better, worse, bits = better[alike], worse[alike], bits[alike]
    star, distance = stars.choose_stars(len(nodes.rows), better, worse, bits)
    strangers = int((~alike).sum())
    counts = {"chains": stars.count_chains(star, better, worse), "strangers_with_near_hashes": strangers}
    return star, distance, counts | {"comparisons_cut_short": cut}


def _load(hashed: list[Hashed]) -> tuple[dict[str, np.ndarray], Counter]:
    """What is known of each row, [rows], 22 bytes of each; and why some cannot be used."""
    dtypes = {"pixels": np.int64, "caption_chars": np.int32, "digest": np.uint64, "usable": bool, "near": bool}
    columns = {name: np.zeros(hashed[-1].rows.stop, dtype) for name, dtype in dtypes.items()}
    skipped = Counter()
    for one in hashed:
        table = one.read(("pixels", "caption_chars", "hash", "sha256", "reason"))
        for name in ("pixels", "caption_chars"):
            columns[name][one.rows] = table[name].fill_null(0).to_numpy()
        digests = table["sha256"].combine_chunks().fill_null(bytes(32))  # of each, the first 64 bits
        numbers = np.frombuffer(digests.buffers()[1], ">u8").reshape(-1, 4)[digests.offset :]
        columns["digest"][one.rows] = numbers[: len(digests), 0]
        columns["usable"][one.rows] = table["reason"].is_null().to_numpy()
        columns["near"][one.rows] = table["hash"].is_valid().to_numpy()
        skipped.update(table["reason"].drop_null().to_pylist())
    return columns, skipped


def _look(
    hashed: list[Hashed], nodes: stars.Nodes, better: np.ndarray, worse: np.ndarray, looked: Looked
) -> np.ndarray:
    """bool [pairs]: whether the pictures of near nodes look alike."""
    wanted = np.zeros(len(nodes.of_rows), bool)
    wanted[nodes.rows[np.union1d(better, worse)]] = True
    place = np.full(len(nodes.rows), -1)
    place[nodes.of_rows[wanted]] = np.arange(wanted.sum())
    found = []
    for one in hashed:
        chosen = np.flatnonzero(wanted[one.rows])
        if len(chosen):
            found += one.read(("thumbnail",))["thumbnail"].take(chosen).to_pylist()
    thumbnails = np.frombuffer(b"".join(found), np.uint8).reshape(-1, THUMBNAIL_SIDE, THUMBNAIL_SIDE, 3)
    alike = np.zeros(len(better), bool)
    for first in range(0, len(better), _PAIRS_AT_ONCE):
        own = slice(first, first + _PAIRS_AT_ONCE)
        pair = thumbnails[place[better[own]]], thumbnails[place[worse[own]]]
        alike[own] = look_alike(*pair, looked.mirrored, looked.crops)
    return alike


def _write_nodes(path: Path, hashed: list[Hashed], of_rows: np.ndarray, is_best: np.ndarray) -> Path:
    """The hashes of the rows that `is_best` marks, as `pairs` takes them."""
    names = ["hash", "mirrored"]
    fields = [*names, *map("crop_{}".format, range(NUM_CROPS))]
    schema = pa.schema({"node": pa.int32()} | dict.fromkeys(fields, pa.int64()))
    with pq.ParquetWriter(path, schema) as writer:
        for one in hashed:
            chosen = np.flatnonzero(is_best[one.rows])
            if len(chosen):
                table = one.read((*names, "crops")).take(chosen)
                crops = table["crops"].combine_chunks().flatten().to_numpy().reshape(-1, NUM_CROPS)
                columns = [pa.array(of_rows[one.rows][chosen]), *(table[name].combine_chunks() for name in names)]
                writer.write_table(pa.table([*columns, *map(pa.array, crops.T)], schema=schema))
    return path


def draw_histogram(path: Path, sizes: Counter, distances: Counter, unit: str) -> None:
    """How many clusters are of which size, and how many copies that are other files at which distance, in `unit`."""
    from matplotlib.figure import Figure

    from ..measure import draw_histogram as draw_counts

    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {"pictures of a cluster": (sizes, "clusters"), f"{unit} from the kept picture": (distances, "copies")}
    for axis, (title, (counts, things)) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        axis.set_xlabel(title)
        axis.set_ylabel(things)
        draw_counts(axis, counts)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)


def draw_sheet(path: Path, indexed: Indexed, labels: stars.Labels, unit: str) -> None:
    """Up to 12 clusters from the farthest copies to the nearest, each with its kept picture first; none: no file."""
    path.unlink(missing_ok=True)
    found = np.flatnonzero(labels.dropped)
    if not len(found):
        return
    # By their farthest copy: where a limit is too wide is seen there.
    farthest = found[np.lexsort((found, labels.distance[found]))][::-1]
    clusters = list(dict.fromkeys(labels.cluster[farthest].tolist()))
    shown = [clusters[place] for place in np.linspace(0, len(clusters) - 1, min(_CLUSTERS, len(clusters))).astype(int)]
    captions, pictures = [], []
    for kept in shown:
        copies = found[labels.cluster[found] == kept]
        copies = copies[np.argsort(-labels.distance[copies], kind="stable")][: _OF_EACH - 1]
        said = ", ".join("same file" if labels.same_file[row] else f"{labels.distance[row]}" for row in copies)
        captions.append(f"row {kept}: {labels.copies[kept]} pictures; {unit}: {said}")
        # A white square before them, so that all become of one size; grey ones for pictures that are gone.
        white, grey = (Image.new("RGB", (_SIDE, _SIDE), color) for color in ("white", "grey"))
        small = [white, *(read_tile(indexed, int(row))[0] or grey for row in (kept, *copies))]
        for picture in small:
            picture.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
        pictures.append(list(pad_alike([*map(np.asarray, small)]))[1:])
    save_png(path, prompt_grid(captions, pictures, side=_SIDE))


def find_pairs(
    run: Engine, num_nodes: int, bits: int, mirrored: bool, crops: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(better, worse, bits from each other) of near nodes, each pair once, int32, int32 and int8; how many comparisons
    with groups were cut short. Of the engine's nodes the best has the lowest number."""
    ones = _hashes_of(["hash"] + (["mirrored"] if mirrored else []))
    others = _hashes_of(["hash"] + ([f"crop_{crop}" for crop in range(NUM_CROPS)] if crops else []))
    found, cut = [], 0
    masks = list(choose_masks(bits, num_nodes))
    with progress(total=len(masks), desc="comparing", unit="table", delay=3) as bar:
        for mask in masks:
            key = f"(hash & CAST('{mask}' AS BIGINT))"
            groups = f"SELECT {key}, count(*) AS n FROM ({ones}) AS o GROUP BY 1 HAVING count(*) > {GROUP_LIMIT}"
            large = run(f"SELECT coalesce(sum(n - {GROUP_LIMIT}), 0) AS n FROM ({groups}) AS g")["n"][0].as_py()
            cut += int(large)
            few = ones
            if large:
                place = f"row_number() OVER (PARTITION BY {key} ORDER BY node) AS n"
                ranked = f"SELECT node, hash, {place} FROM ({ones}) AS o"
                few = f"SELECT node, hash FROM ({ranked}) AS r WHERE n <= {GROUP_LIMIT}"
            distance = "bit_count(xor(a.hash, b.hash))"
            table = run(
                "SELECT least(a.node, b.node) AS better, greatest(a.node, b.node) AS worse, "
                f"CAST(min({distance}) AS TINYINT) AS bits FROM ({others}) AS a JOIN ({few}) AS b "
                f"ON {key.replace('hash', 'a.hash')} = {key.replace('hash', 'b.hash')} "
                f"WHERE a.node <> b.node AND {distance} <= {bits} GROUP BY 1, 2"
            )
            found.append([table[name].to_numpy() for name in ("better", "worse", "bits")])
            bar.update()
    better, worse, apart = map(np.concatenate, zip(*found, strict=True))
    order = np.lexsort((apart, worse, better))  # each pair once, with its fewest bits
    better, worse, apart = better[order], worse[order], apart[order]
    first = np.ones(len(better), bool)
    first[1:] = (better[1:] != better[:-1]) | (worse[1:] != worse[:-1])
    return better[first], worse[first], apart[first], cut


def choose_masks(bits: int, num_hashes: int) -> Iterator[int]:
    """int64 masks, of which every two hashes within `bits` of each other agree under at least one."""

    def cost(num_bands: int) -> float:
        shared = 2.0 ** (_HASH_BITS * (num_bands - bits) / num_bands)
        return math.comb(num_bands, bits) * (1 + _COMPARISON_COST * num_hashes / shared)

    num_bands = min(range(bits + 1, bits + 9), key=cost)
    edges = [round(band * _HASH_BITS / num_bands) for band in range(num_bands + 1)]
    bands = [(1 << high) - (1 << low) for low, high in zip(edges, edges[1:], strict=False)]
    for chosen in combinations(bands, num_bands - bits):
        mask = sum(chosen)
        yield mask - (1 << _HASH_BITS) if mask >= 1 << (_HASH_BITS - 1) else mask


def _hashes_of(columns: list[str]) -> str:
    """SQL: every node with each of these hashes of it."""
    return " UNION ALL ".join(f"SELECT node, {column} AS hash FROM nodes" for column in columns)


@contextmanager
def duckdb_engine(nodes: Path, memory_gb: float) -> Iterator[Engine]:
    """Over the parquet file `nodes`, beside which goes what does not fit into memory. Raises OutputError."""
    duckdb = load_duckdb()
    try:
        with connect(memory_gb, nodes.parent / "spill") as connection:
            execute(connection, f"CREATE TABLE nodes AS SELECT * FROM {parquet_sql([nodes])}")
            yield lambda query: execute(connection, query, lambda done: done.to_arrow_table())
    except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
        problem = " ".join(str(error).split())[:300]
        raise OutputError(f"DuckDB ran out of room ({problem}); give more by --memory-gb, or make room") from error


def spark_engine(spark, nodes: Path) -> Engine:
    """Over the parquet file `nodes`, in a folder that all executors see."""
    spark.read.parquet(escape_glob(f"file://{nodes.absolute()}")).createOrReplaceTempView("nodes")
    spark.sql("CREATE OR REPLACE TEMPORARY FUNCTION xor(a BIGINT, b BIGINT) RETURNS BIGINT RETURN a ^ b")
    return lambda query: spark.sql(query).toArrow()
