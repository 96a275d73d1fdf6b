"""How fast `--where` chooses rows by their metadata:  python benchmarks/select_rows.py [--rows 40000000] [--json OUT]

Makes a few part files' indexes and columns, 6,667 rows each with the fields that LAION's tables have, and names them
again and again in a filelist, by links, until there are as many rows as asked for; then times `select_rows` as a run
calls it, with `--workers` processes, from the filelist to the selection. The parts themselves are empty: choosing reads
none of their rows. What is read comes from the page cache, so disks are not measured. Rates on a machine with other
load are too low; its load average per core is told, and the time that the cores worked.
"""

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from results import add_result_flags, save_results

from ppldm.data.filelist import read_sources
from ppldm.data.formats.index import COLUMNS, GZIP_MEMBERS, make_index, write_index
from ppldm.data.formats.part import index_path
from ppldm.data.select.columns import ColumnsWriter, columns_key
from ppldm.data.select.expression import parse_where
from ppldm.data.select.selection import select_rows

ROWS_PER_PART = 6_667
NUM_DISTINCT = 8
WHERE = 'width>=512 and height>=512 and pwatermark<=0.5 and punsafe<0.1 and aesthetic>=5 and license in ("cc0", "by")'
CORES = 2  # that the time for 400 million rows is told for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000_000, help="rows of all parts")
    parser.add_argument("--where", default=WHERE, help="the condition")
    parser.add_argument("--workers", type=int, default=CORES, help="processes")
    add_result_flags(parser, "select_rows")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        filelist, columns_bytes = make_parts(Path(folder), max(1, arguments.rows // ROWS_PER_PART))
        sources = read_sources(filelist)
        begin, cpu = time.perf_counter(), cpu_seconds()
        selection = select_rows(sources, parse_where(arguments.where), 256, arguments.workers)
        seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    rate = selection.num_rows / seconds
    result = {
        "rows": selection.num_rows,
        "parts": len(sources[0].parts),
        "where": arguments.where,
        "workers": arguments.workers,
        "seconds": round(seconds, 2),
        "rows_per_second": round(rate),
        "cpu_seconds": round(cpu, 2),
        "seconds_for_400_million_rows_at_this_rate": round(4e8 / rate, 1),
        "cpu_seconds_for_400_million_rows_per_worker": round(cpu / selection.num_rows * 4e8 / arguments.workers, 1),
        "rows_selected": len(selection),
        "peak_mib": {
            name: resource.getrusage(who).ru_maxrss >> 10
            for name, who in (("main", resource.RUSAGE_SELF), ("largest_worker", resource.RUSAGE_CHILDREN))
        },
        "columns_bytes_per_row": round(columns_bytes / ROWS_PER_PART, 1),
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    save_results(arguments, result)


def make_parts(folder: Path, num_parts: int) -> tuple[Path, int]:
    """(a filelist of so many parts, bytes of the columns of one)."""
    for number in range(NUM_DISTINCT):
        make_part(folder / f"{number}.gz", random.Random(number))
    for number in range(num_parts):
        for suffix in ("", ".idx", ".columns"):
            os.symlink(f"{number % NUM_DISTINCT}.gz{suffix}", folder / f"part-{number:06}.gz{suffix}")
    filelist = folder / "all.filelist"
    filelist.write_text("".join(f"part-{number:06}.gz\n" for number in range(num_parts)))
    return filelist, (folder / "0.gz.columns").stat().st_size


def make_part(path: Path, draw: random.Random) -> None:
    """An empty part with the index and the columns of random rows."""
    path.write_bytes(b"\0")
    table = [(row, 1, draw.randrange(200, 2000), draw.randrange(200, 2000)) for row in range(ROWS_PER_PART)]
    index = make_index(GZIP_MEMBERS, 1, 0, table)
    with open(COLUMNS.index_path(path), "wb") as file:
        columns = ColumnsWriter(file)
        for row in range(ROWS_PER_PART):
            url = f"https://host{draw.randrange(5000)}.example/{draw.getrandbits(64):016x}.jpg"
            meta = {
                "key": f"{row:09}",
                "url": url,
                "sha256": f"{draw.getrandbits(256):064x}",
                "aesthetic": draw.gauss(5, 0.7),
                "pwatermark": float(np.float32(draw.random())),
                "punsafe": float(np.float32(draw.random() ** 8)),
                "similarity": round(draw.gauss(0.32, 0.03), 5),
                "license": draw.choice(["cc0", "by", "by-sa", "?"]),
                "original_width": draw.randrange(200, 4000),
                "original_height": draw.randrange(200, 4000),
            }
            columns.add(f"a picture of {draw.getrandbits(40):x} and {draw.getrandbits(40):x}", meta)
        columns.finish(columns_key((index.part_bytes, index.part_crc32), ROWS_PER_PART))
    write_index(index_path(path), index)
    newest = time.time_ns()
    os.utime(index_path(path), ns=(newest, newest))


def cpu_seconds() -> float:
    """Of this process and those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
