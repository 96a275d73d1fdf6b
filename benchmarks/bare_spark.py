"""What Spark itself takes for a filter, without counts, seed and names:  python -m benchmarks.bare_spark IN OUT

The conditions of `--preset laion2b-en`, `orderBy(rand(0))` unless `--no-shuffle`, and parquet written.
benchmarks/filter.py runs it as the engine `bare-spark`.
"""

import argparse
import json
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--memory-gb", type=float, default=2.5)
    parser.add_argument("--no-shuffle", action="store_true")
    arguments = parser.parse_args()
    started = time.monotonic()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import rand

    builder = SparkSession.builder.master(f"local[{os.cpu_count()}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.memory", f"{arguments.memory_gb * 1000:.0f}m").getOrCreate()
    rows = spark.read.parquet(arguments.input)
    num_rows = rows.count()  # of the footers
    kept = rows.where("WIDTH >= 512 AND HEIGHT >= 512 AND punsafe <= 0.98 AND AESTHETIC_SCORE >= 4.5")
    (kept if arguments.no_shuffle else kept.orderBy(rand(0))).write.parquet(arguments.output)
    num_out = spark.read.parquet(arguments.output).count()
    seconds = time.monotonic() - started
    report = {"rows_out": num_out, "seconds": round(seconds, 2), "rows_in_per_sec": round(num_rows / seconds)}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
