"""What files that are copied first cost, beside our own parts:  python benchmarks/foreign_rows.py [--json OUT]

Writes the same rows as a part of ours, as ordinary gzip (`gzip -6`) and as parquet (row groups of 100 rows, snappy, as
img2dataset writes them). Says what index and copy take once, and reads all in the windowed order of training: the rows
alone, and whole samples at 256 pixels. Turns alternate, each keeps its best; CPU time of one process, which other load
on the machine hurts little.
"""

import argparse
import gzip
import os
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from photographs import make_rows
from results import add_result_flags, save_results

from ppldm.data.dataset import TextImageDataset
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.inputs import Normals, Pixels
from ppldm.data.order import Mix
from ppldm.utils.rng import Stream

INPUTS = {"pixel_values": Pixels(), "posterior_noise": Normals(Stream.POSTERIOR, 4, 8)}
FORMATS = {"own": "part", "gzip": "part", "parquet": "parquet"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000, help="rows of the part")
    parser.add_argument("--photographs", type=int, default=50, help="different pictures among them")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    parser.add_argument("--quick", action="store_true", help="a few rows, once: to see that it runs")
    add_result_flags(parser, "foreign_rows")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.photographs, arguments.repeats = 20, 4, 1
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PPLDM_CACHE_DIR"] = f"{folder}/cache"
        results = compare(Path(folder), arguments)
    for name, found in results["first use"].items():
        sys.stdout.write(
            f"{name:<8} index{' and copy' if name != 'own' else ''}: {found['us_a_row']:.0f} us a row, "
            f"{found['mb_per_second']:.0f} MB/s; the copy is {found['copy_share']:.2f} of the file\n"
        )
    for what, formats in results["reading"].items():
        for name, found in formats.items():
            sys.stdout.write(
                f"{what:<8}{name:<8}{found['us']:8.0f} us{found['ratio']:8.2f} of the speed of our own parts\n"
            )
    save_results(arguments, results)


def compare(folder: Path, arguments: argparse.Namespace) -> dict:
    """All numbers, as JSON has them."""
    pictures = make_rows(arguments.photographs)
    rows = [pictures[number % len(pictures)] for number in range(arguments.rows)]
    write_part(folder / "own", rows)
    text = gzip.decompress((folder / "own").read_bytes())
    (folder / "gzip").write_bytes(gzip.compress(text, 6))
    columns = {"jpg": [row.image for row in rows], "txt": [row.caption for row in rows]}
    columns |= {key: [row.meta[key] for row in rows] for key in rows[0].meta}
    pq.write_table(pa.table(columns), folder / "parquet", row_group_size=100, use_dictionary=False)
    (folder / "own.idx").unlink()
    first = {name: measure_first_use(folder, name, len(rows)) for name in FORMATS}
    datasets = {name: open_dataset(folder, name) for name in FORMATS}
    _, order = Mix(datasets["own"].list_sizes, None, 0).samples(0, len(rows))
    read = {
        "rows": lambda dataset: [dataset.read_row(row) for row in order.tolist()],
        "samples": lambda dataset: [dataset[0, row] for row in order.tolist()[:200]],
    }
    reading = {what: take_turns(datasets, function, arguments.repeats) for what, function in read.items()}
    mean = sum(len(row.image) for row in rows) / len(rows)
    return {"rows": len(rows), "mean_image_bytes": mean, "first use": first, "reading": reading}


def measure_first_use(folder: Path, name: str, rows: int) -> dict:
    """What index and copy of a file cost, in CPU time and room."""
    before = time.process_time()
    dataset = open_dataset(folder, name)
    dataset.read_row(0)
    seconds = time.process_time() - before
    num_bytes = (folder / name).stat().st_size
    copied = sum(path.stat().st_size for path in (folder / "cache").glob(f"copies/*-{name}.*"))
    return {
        "us_a_row": 1e6 * seconds / rows,
        "mb_per_second": num_bytes / 1e6 / seconds,
        "copy_share": copied / num_bytes,
    }


def open_dataset(folder: Path, name: str) -> TextImageDataset:
    """One file as training reads it."""
    write_filelist(folder / f"{name}.filelist", [name])
    (folder / f"{name}.list").write_text(f"{name}.filelist format={FORMATS[name]}\n")
    return TextImageDataset(read_sources(folder / f"{name}.list"), INPUTS, 256, 0)


def take_turns(datasets: dict, function, repeats: int) -> dict:
    """Microseconds of CPU time a row of each, the best of `repeats` and the first, which warms up; its speed as a share
    of that of "own"."""
    turns = {name: [] for name in datasets}
    for _ in range(repeats + 1):
        for name, dataset in datasets.items():
            before = time.process_time()
            count = len(function(dataset))
            turns[name].append(1e6 * (time.process_time() - before) / count)
    best = {name: min(times[1:]) for name, times in turns.items()}
    return {
        name: {"us": best[name], "first_us": turns[name][0], "ratio": best["own"] / best[name]} for name in datasets
    }


if __name__ == "__main__":
    main()
