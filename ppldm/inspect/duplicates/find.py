"""Copies among rows: hashed, compared, and gathered around the best ones, as `ppldm dedup` reports them."""

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from PIL import Image

from ...data.images.decode import decode_image
from ...utils.errors import RowError
from ...utils.files import atomic_write, make_output_dir, write_json
from ...utils.grid import pad_alike, prompt_grid
from ...utils.machine.spark import is_submitted, spark_session
from ...utils.pictures import save_png
from ..histograms import draw_histogram as draw_counts
from ..parts import Indexed, open_rows, over_rows
from .embeddings import find_stars, read_embeddings
from .hashes import NUM_CROPS, THUMBNAIL_SIDE, Hashed, hash_span, look_alike, read_digests
from .pairs import duckdb_engine, find_pairs, spark_engine
from .stars import Labels, Nodes, choose_stars, count_chains, make_labels, make_nodes, rank_rows, write_labels

_PAIRS_AT_ONCE = 2048
_CLUSTERS, _OF_EACH, _SIDE = 12, 5, 128  # of the sheet


@dataclass(frozen=True)
class Looked:
    """What counts as a copy, `bits` being -1 for equal files only, and where it is looked for; with a folder of
    `embeddings`, only by these."""

    bits: int = 6
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
    """Write what `ppldm dedup` says into the folder `out`; return the report. Raises DataError, OutputError."""
    hashed = _hash_rows(indexed, out, num_workers)
    columns, skipped = _load(hashed)
    ranked = rank_rows(rules, columns["pixels"], columns["caption_chars"])
    nodes = make_nodes(ranked, columns["usable"], columns["digest"])
    if looked.embeddings:
        found = read_embeddings(looked.embeddings, indexed)
        columns["near"] = columns["usable"] & found.any(axis=1)
        (star, distance), counts = find_stars(found[nodes.rows], looked.least_similarity), {}
    else:
        star, distance, counts = _find_near(hashed, nodes, columns["near"], out, looked)
    labels = make_labels(nodes.of_rows, nodes.rows, star, distance, columns["digest"])
    write_labels(out, hashed, labels)
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
    draw_sheet(out / "sheet.png", hashed, labels, looked.unit)
    write_json(out / "report.json", report)
    return report


def _find_near(
    hashed: list[Hashed], nodes: Nodes, near: np.ndarray, out: Path, looked: Looked
) -> tuple[np.ndarray, np.ndarray, dict]:
    """(star, distance) of nodes, as `choose_stars` has them, by the hashes of the rows that `near` marks; and what the
    report says of it."""
    is_best = np.zeros(len(near), bool)
    is_best[nodes.rows] = near[nodes.rows]
    better, worse, bits, cut = _compare(hashed, nodes.of_rows, is_best, out, looked)
    alike = _look(hashed, nodes, better, worse, looked)
    better, worse, bits = better[alike], worse[alike], bits[alike]
    star, distance = choose_stars(len(nodes.rows), better, worse, bits)
    strangers = int((~alike).sum())
    counts = {"chains": count_chains(star, better, worse), "strangers_with_near_hashes": strangers}
    return star, distance, counts | {"comparisons_cut_short": cut}


def _hash_rows(indexed: Indexed, out: Path, num_workers: int) -> list[Hashed]:
    """All spans in the order of their rows, with the files of their hashes."""
    folder = make_output_dir(out / "hashes")
    order = {part: number for number, part in enumerate(indexed.rows)}
    files = list(over_rows(partial(hash_span, folder=folder), indexed, num_workers, "hashing"))
    hashed, start = [], 0
    for span, path in sorted(files, key=lambda one: (order[one[0].part], one[0].start)):
        rows = slice(start, start + span.stop - span.start)
        hashed.append(Hashed(span, path, rows))
        start = rows.stop
    return hashed


def _load(hashed: list[Hashed]) -> tuple[dict[str, np.ndarray], Counter]:
    """What is known of each row, [rows], 22 bytes of each; and why some cannot be used."""
    dtypes = {"pixels": np.int64, "caption_chars": np.int32, "digest": np.uint64, "usable": bool, "near": bool}
    columns = {name: np.zeros(hashed[-1].rows.stop, dtype) for name, dtype in dtypes.items()}
    skipped = Counter()
    for one in hashed:
        table = one.read(("pixels", "caption_chars", "hash", "sha256", "reason"))
        for name in ("pixels", "caption_chars"):
            columns[name][one.rows] = table[name].fill_null(0).to_numpy()
        columns["digest"][one.rows] = read_digests(table)
        columns["usable"][one.rows] = table["reason"].is_null().to_numpy()
        columns["near"][one.rows] = table["hash"].is_valid().to_numpy()
        skipped.update(table["reason"].drop_null().to_pylist())
    return columns, skipped


def _compare(
    hashed: list[Hashed], of_rows: np.ndarray, is_best: np.ndarray, out: Path, looked: Looked
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """`pairs.find_pairs` of the nodes of the rows that `is_best` marks."""
    num_near = int(is_best.sum())
    if looked.bits < 0 or num_near < 2:
        nothing = np.zeros(0, np.int32)
        return nothing, nothing, nothing.astype(np.int8), 0
    folder = make_output_dir(out / ".comparing")
    try:
        path = _write_nodes(folder / "nodes.parquet", hashed, of_rows, is_best)
        how = num_near, looked.bits, looked.mirrored, looked.crops
        if looked.master or is_submitted():
            with spark_session(looked.master, looked.memory_gb) as spark:
                return find_pairs(spark_engine(spark, path), *how)
        with duckdb_engine(path, looked.memory_gb) as engine:
            return find_pairs(engine, *how)
    finally:
        rmtree(folder, ignore_errors=True)


def _look(hashed: list[Hashed], nodes: Nodes, better: np.ndarray, worse: np.ndarray, looked: Looked) -> np.ndarray:
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
    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {"pictures of a cluster": (sizes, "clusters"), f"{unit} from the kept picture": (distances, "copies")}
    for axis, (title, (counts, things)) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        axis.set_xlabel(title)
        axis.set_ylabel(things)
        draw_counts(axis, counts)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)


def draw_sheet(path: Path, hashed: list[Hashed], labels: Labels, unit: str) -> None:
    """Up to 12 clusters spread from the farthest copies to the nearest, each with the kept picture first; no file where
    there are none."""
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
        small = [_read_small(hashed, int(row)) for row in (kept, *copies)]
        # Padded to the size of a white square before them, so that all become of one size.
        pictures.append(list(pad_alike([np.full((_SIDE, _SIDE, 3), 255, np.uint8), *small]))[1:])
    save_png(path, prompt_grid(captions, pictures, side=_SIDE))


def _read_small(hashed: list[Hashed], row: int) -> np.ndarray:
    """A picture by its number through all rows, uint8, sides at most _SIDE; grey where it is gone."""
    own = next(one for one in hashed if row < one.rows.stop)
    try:
        with closing(open_rows(own.span.part)) as part:
            picture = decode_image(part.read(own.span.start + row - own.rows.start).image)
    except RowError:
        return np.full((_SIDE, _SIDE, 3), 128, np.uint8)
    picture.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    return np.asarray(picture)
