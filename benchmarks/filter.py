"""How fast metadata is filtered:  python benchmarks/filter.py [--rows 10000000] [--json [OUT]]

Makes four tables in the columns of LAION2B-en, of which the conditions of `--preset laion2b-en` keep one row in four,
as they do of the real one. Filters them by each engine as a user does, by the command, with the seeded shuffle and
without, each in a process of its own; bare-spark is what Spark takes without us (benchmarks/bare_spark.py). Rates are
of input rows and count all but the start of Python; `whole` counts that too. Memory is that of the largest process.
`cpu` is the time that the cores worked, which other load on the machine changes less.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from commands import measure_command
from results import add_result_flags, save_results

NUM_FILES = 4
CHUNK_ROWS = 250_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of all tables")
    parser.add_argument("--engines", nargs="+", default=["duckdb", "spark", "bare-spark"], help="engines")
    parser.add_argument("--memory-gb", type=float, default=2.5, help="memory to give to the engine")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each; the best counts")
    add_result_flags(parser, "filter")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tables = Path(folder, "tables")
        write_tables(tables, arguments.rows)
        size = sum(path.stat().st_size for path in tables.iterdir())
        sys.stdout.write(f"{arguments.rows:,} rows, {size / 1e9:.2f} GB, {os.cpu_count()} cores\n")
        results = []
        for engine in arguments.engines:
            for shuffled in (True, False):
                runs = [
                    measure(engine, shuffled, tables, Path(folder, f"{engine}{shuffled}{run}"), arguments.memory_gb)
                    for run in range(arguments.repeats)
                ]
                results.append(max(runs, key=lambda run: run["rows_per_sec"]))
                sys.stdout.write(describe(results[-1]) + "\n")
    save_results(arguments, {"rows": arguments.rows, "bytes": size, "runs": results})


def write_tables(folder: Path, num_rows: int) -> None:
    """Tables of random rows, of which about 25 % meet `--preset laion2b-en`."""
    folder.mkdir()
    for number in range(NUM_FILES):
        rng = np.random.default_rng(number)
        left = num_rows * (number + 1) // NUM_FILES - num_rows * number // NUM_FILES
        writer = None
        while left:
            table = make_table(rng, min(CHUNK_ROWS, left))
            writer = writer or pq.ParquetWriter(folder / f"2B-en-4.5_{number + 1}.parquet", table.schema)
            writer.write_table(table)
            left -= table.num_rows
        writer.close()


def make_table(rng: np.random.Generator, num_rows: int) -> pa.Table:
    """Sizes are uniform from 100 to 937 pixels, so that a quarter of the rows is large enough in both directions."""
    hashes = rng.integers(-(2**63), 2**63, num_rows)
    text = pa.array(hashes).cast(pa.string())
    columns = {
        "URL": pc.binary_join_element_wise(
            "https://img1.example.com/186/0", text, "il_340x270.1310915051_5kax.jpg", "/"
        ),
        "TEXT": pc.binary_join_element_wise("Vintage Green Glass Swag Hanging Lamp", text, "Mid Century", " "),
        "WIDTH": rng.integers(100, 937, num_rows).astype(np.float64),
        "HEIGHT": rng.integers(100, 937, num_rows).astype(np.float64),
        "similarity": rng.uniform(0.25, 0.45, num_rows),
        "punsafe": rng.random(num_rows) ** 12,
        "pwatermark": rng.random(num_rows),
        "AESTHETIC_SCORE": rng.uniform(4.5, 7, num_rows),
        "hash": hashes,
    }
    return pa.table(columns)


def measure(engine: str, shuffled: bool, tables: Path, output: Path, memory_gb: float) -> dict:
    """Run the command once."""
    flags = ["--memory-gb", str(memory_gb), *([] if shuffled else ["--no-shuffle"])]
    if engine == "bare-spark":
        cost = measure_command("benchmarks.bare_spark", [tables, output, *flags])
    else:
        flags += ["--preset", "laion2b-en", "--engine", engine, "--json"]
        cost = measure_command("ppldm", ["filter", "--input", tables, "--output", output, *flags])
    manifest = json.loads(cost.printed)
    return {
        "engine": engine,
        "shuffle": shuffled,
        "rows_out": manifest["rows_out"],
        "seconds": manifest["seconds"],
        "rows_per_sec": manifest["rows_in_per_sec"],
        "whole_seconds": round(cost.seconds, 2),
        "cpu_seconds": round(cost.cpu_seconds, 2),
        "peak_gb": round(cost.peak_gb, 2),
    }


def describe(run: dict) -> str:
    """A line of the table."""
    order = "seeded shuffle" if run["shuffle"] else "order kept"
    return (
        f"{run['engine']:<11} {order:<15}{run['rows_per_sec'] / 1e6:6.2f} million rows/s, {run['seconds']:7.2f} s "
        f"(whole {run['whole_seconds']:.2f} s, cpu {run['cpu_seconds']:.2f} s), {run['peak_gb']:.2f} GB, "
        f"{run['rows_out']:,}"
    )


if __name__ == "__main__":
    main()
