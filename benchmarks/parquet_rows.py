"""How fast rows of parquet files are read, beside our own parts:  python benchmarks/parquet_rows.py [--json OUT]

Writes the same rows as a part of ours and as parquet files, with row groups of 20, 100 and 1,000 rows, and reads all in
the windowed order of training: the rows alone, and whole samples at 256 pixels. img2dataset writes groups of 100 rows,
compressed by snappy. Turns alternate, each keeps its best; CPU time of one process, which other load on the machine
hurts little. Prints how fast each is, our own parts being 1, and the first turn, which finds the pages. What is kept of
pages that are decoded whole (those of gzip and zstd) is as small a share of the file as of a window of a large one.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from packed_parts import take_turns
from photographs import make_rows
from results import add_result_flags, save_results

from ppldm.data.dataset import TextImageDataset
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.parquet import table as parquet_table
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.inputs import Normals, Pixels
from ppldm.data.order.rows import RUN_LENGTH, WINDOW_RUNS, Mix
from ppldm.utils.rng import Stream

INPUTS = {"pixel_values": Pixels(), "posterior_noise": Normals(Stream.POSTERIOR, 4, 8)}
WINDOW_ROWS = RUN_LENGTH * WINDOW_RUNS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000, help="rows of the part")
    parser.add_argument("--photographs", type=int, default=50, help="different pictures among them")
    parser.add_argument("--rows-of-group", type=int, nargs="+", default=[20, 100, 1000], help="rows of a row group")
    parser.add_argument("--compressions", nargs="+", default=["snappy", "none"], help="of pages")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each")
    parser.add_argument("--quick", action="store_true", help="a few rows, once: to see that it runs")
    add_result_flags(parser, "parquet_rows")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.photographs, arguments.repeats = 40, 4, 1
    with tempfile.TemporaryDirectory() as folder:
        results = compare(Path(folder), arguments)
    for what, tables in results["reading"].items():
        for name, found in tables.items():
            sys.stdout.write(
                f"{what:<8}{name:<14}{found['us']:8.0f} us, first turn {found['first_us']:8.0f} us"
                f"{found['ratio']:8.2f} of our own parts\n"
            )
    save_results(arguments, results)


def compare(folder: Path, arguments: argparse.Namespace) -> dict:
    """All numbers, as JSON has them."""
    pictures = make_rows(arguments.photographs)
    rows = [different(pictures[number % len(pictures)], number) for number in range(arguments.rows)]
    parquet_table._CACHE.limit = int(parquet_table._CACHE.limit * min(1, arguments.rows / WINDOW_ROWS))
    write_part(folder / "own", rows)
    columns = {"jpg": [row.image for row in rows], "txt": [row.caption for row in rows]}
    for key in rows[0].meta:
        columns[key] = [row.meta[key] for row in rows]
    table = pa.table({"key": list(range(len(rows))), **columns})
    datasets = {"own": open_dataset(folder, "own", "part")}
    for compression in arguments.compressions:
        for size in arguments.rows_of_group:
            name = f"{compression}-{size}"
            with pq.ParquetWriter(folder / name, table.schema, compression=compression) as writer:
                for start in range(0, len(rows), size):  # a group a call, as img2dataset writes
                    writer.write_table(table.slice(start, size))
            datasets[name] = open_dataset(folder, name, "parquet")
    _, order = Mix(datasets["own"].list_sizes, None, 0).samples(0, arguments.rows)
    order = order.tolist()
    read = {
        "rows": lambda dataset: [dataset.read_row(row) for row in order],
        "samples": lambda dataset: [dataset[0, row] for row in order[:200]],
    }
    reading = {what: take_turns(datasets, function, arguments.repeats) for what, function in read.items()}
    return {
        "rows": len(rows),
        "mean_image_bytes": sum(len(row.image) for row in rows) / len(rows),
        "reading": reading,
    }


def different(row: Row, number: int) -> Row:
    """The row with a picture that no other row has, as dictionaries keep alike ones once. JPEG ends before that."""
    return replace(row, image=row.image + number.to_bytes(8, "little"))


def open_dataset(folder: Path, name: str, format: str) -> TextImageDataset:
    """One file as training reads it."""
    write_filelist(folder / f"{name}.filelist", [name])
    (folder / f"{name}.list").write_text(f"{name}.filelist format={format}\n")
    return TextImageDataset(read_sources(folder / f"{name}.list"), INPUTS, 256, 0)


if __name__ == "__main__":
    main()
