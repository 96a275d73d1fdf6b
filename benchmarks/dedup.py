"""What `ppldm dedup` finds, and what it costs:  python benchmarks/dedup.py [--json OUT]

Quality: pictures of 256 pixels, half of them like photographs, half scenes of the shapes world, which look much more
alike than those; of some, planted copies: resized to 60 %, compressed again (JPEG, quality 40), cropped by 5 % of both
sides at a place that is drawn, mirrored. Recall is the share of planted copies in the cluster of their original, by
kind; precision the share of rows named copies that have the origin of the row kept for them.

Cost: random hashes, of which a tenth are near others, compared by DuckDB. Memory is the process' peak, in GB.
"""

import argparse
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from json import dumps, loads
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from photographs import _draw_clouds
from PIL import Image, ImageOps
from results import add_result_flags, save_results

from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.demo.shapes_world.draw import draw_picture
from ppldm.demo.shapes_world.grammar import draw_scene
from ppldm.inspect.duplicates.dedup import Looked, duckdb_engine, find_duplicates, find_pairs
from ppldm.inspect.duplicates.hashes import NUM_CROPS
from ppldm.inspect.parts import index_parts, list_parts

SIDE, CROP = 256, 0.05
KINDS = ("resized", "compressed", "cropped", "mirrored")
WORLDS = ("photographs", "shapes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=10_000, help="of the quality, copies among them; 0: none")
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 4, 6, 8], help="limits to try")
    parser.add_argument("--hashes", type=float, nargs="*", default=[1e6], help="of the cost")
    parser.add_argument("--memory_gb", type=float, default=4.0, help="of DuckDB")
    parser.add_argument("--quick", action="store_true", help="a few pictures and hashes: to see that it runs")
    parser.add_argument("--one_cost", help=argparse.SUPPRESS)
    add_result_flags(parser, "dedup")
    arguments = parser.parse_args()
    if arguments.one_cost:
        sys.stdout.write(dumps(measure_cost(**loads(arguments.one_cost))) + "\n")
        return
    if arguments.quick:
        arguments.pictures, arguments.bits, arguments.hashes = 60, [4], [1000]
    results = {"quality": [], "cost": []}
    if arguments.pictures:
        results["quality"] = measure_quality(arguments.pictures, arguments.bits)
    for hashes in arguments.hashes:
        for crops in (False, True):
            how = {"num_hashes": int(hashes), "crops": crops, "memory_gb": arguments.memory_gb}
            command = [sys.executable, __file__, "--one_cost", dumps(how)]  # a process of its own, for its peak
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results["cost"].append(loads(found))
            sys.stdout.write(found)
    save_results(arguments, results)


def measure_quality(num_pictures: int, limits: list[int]) -> list[dict]:
    """Of each limit and each world: precision, recall by kind, and with mirrored copies looked for or not."""
    results = []
    with tempfile.TemporaryDirectory() as name:
        for world in WORLDS:
            folder = Path(name, world)
            folder.mkdir()
            start = time.perf_counter()
            with ProcessPoolExecutor(os.cpu_count()) as executor:
                made = executor.map(partial(_make, world=world), range(num_pictures // 10), chunksize=8)
                rows = [row for rows in made for row in rows]
            rows = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
            write_part(folder / "part.gz", rows)
            write_filelist(folder / "list.filelist", ["part.gz"])
            sys.stdout.write(f"{world}: {len(rows)} pictures drawn in {time.perf_counter() - start:.0f} s\n")
            origins, kinds = ([row.meta[key] for row in rows] for key in ("origin", "kind"))
            indexed = index_parts(list_parts([str(folder / "list.filelist")]), 1)
            for bits in limits:
                for mirrored in (False, True):
                    start = time.process_time()
                    find_duplicates(indexed, folder, ["largest", "first"], Looked(bits, mirrored), os.cpu_count())
                    labels = pq.read_table(folder / "labels.parquet")
                    found = {"world": world, "pictures": len(rows), "bits": bits, "mirrored": mirrored}
                    found |= _score(labels, np.array(origins), np.array(kinds))
                    results.append(found)
                    sys.stdout.write(dumps(found) + "\n")
    return results


def _make(number: int, world: str) -> list[Row]:
    """Five rows: an original and its copies for every second number, else five originals."""
    rng = np.random.default_rng((1, number, WORLDS.index(world)))
    if number % 2:
        return [_row(_draw(rng, world), f"{number}-{i}", "original", 90) for i in range(5)]
    picture = _draw(rng, world)
    width, height = picture.size
    cut_x, cut_y = round(width * CROP), round(height * CROP)
    left, top = int(rng.integers(cut_x + 1)), int(rng.integers(cut_y + 1))
    copies = {
        "original": (picture, 90),
        "resized": (picture.resize((width * 6 // 10, height * 6 // 10), Image.Resampling.LANCZOS), 90),
        "compressed": (picture, 40),
        "cropped": (picture.crop((left, top, left + width - cut_x, top + height - cut_y)), 90),
        "mirrored": (ImageOps.mirror(picture), 90),
    }
    return [_row(copy, str(number), kind, quality) for kind, (copy, quality) in copies.items()]


def _draw(rng: np.random.Generator, world: str) -> Image.Image:
    if world == "photographs":
        return _draw_clouds(rng, SIDE * 3 // 2 if rng.random() < 0.5 else SIDE, SIDE)
    return Image.fromarray(draw_picture(draw_scene(rng, held_out=False), SIDE, rng))


def _row(picture: Image.Image, origin: str, kind: str, quality: int) -> Row:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Row("a picture", file.getvalue(), {"origin": origin, "kind": kind, "key": f"{origin}-{kind}"})


def _score(labels: pa.Table, origins: np.ndarray, kinds: np.ndarray) -> dict:
    cluster = labels["cluster"].fill_null(-1).to_numpy().copy()
    alone = cluster < 0
    cluster[alone] = np.flatnonzero(alone)
    own = {origin: cluster[place] for place, origin in enumerate(origins) if kinds[place] == "original"}
    together = np.array([own[origin] == found for origin, found in zip(origins, cluster, strict=True)])
    copies = cluster != np.arange(len(cluster))
    right = origins[cluster] == origins
    recall = {kind: round(float(together[kinds == kind].mean()), 4) for kind in KINDS}
    # A mirrored copy that is not looked for is to be kept.
    lost = int((copies & ~right).sum())
    return {"precision": round(float(right[copies].mean()), 4), "recall": recall, "distinct_pictures_lost": lost}


def measure_cost(num_hashes: int, crops: bool, memory_gb: float, bits: int = 4) -> dict:
    """Seconds and peak memory of comparing so many hashes."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        path, start = Path(name, "nodes.parquet"), 0
        fields = ["hash", "mirrored", *(f"crop_{crop}" for crop in range(NUM_CROPS))]
        schema = pa.schema({"node": pa.int32()} | dict.fromkeys(fields, pa.int64()))
        with pq.ParquetWriter(path, schema) as writer:
            while start < num_hashes:
                size = min(100_000, num_hashes - start)
                hashes = rng.integers(-(2**63), 2**63 - 1, (len(fields), size))
                near = rng.random(size) < 0.1  # a bit beside the hash before
                hashes[0, 1:][near[1:]] = hashes[0, :-1][near[1:]] ^ 1
                node = np.arange(start, start + size, dtype=np.int32)
                writer.write_table(pa.table([pa.array(node), *map(pa.array, hashes)], schema=schema))
                start += size
        begun = time.perf_counter()
        with duckdb_engine(path, memory_gb) as engine:
            better, _, _, cut = find_pairs(engine, num_hashes, bits, mirrored=False, crops=crops)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    seconds = round(time.perf_counter() - begun, 1)
    found = {"pairs": len(better), "cut": cut, "seconds": seconds, "peak_memory_gb": round(peak, 2)}
    return {"hashes": num_hashes, "bits": bits, "crops": crops, "memory_gb": memory_gb} | found


if __name__ == "__main__":
    main()
