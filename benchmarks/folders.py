"""What listing a folder of pictures costs:  python benchmarks/folders.py [--names 100000 1000000] [--json OUT]

Makes folders of empty files, two to a row (`.jpg`, `.txt`), and reads them as `ppldm convert` does: spans of 1,000 rows
each, every span's rows named. Each folder is read in a process of its own. CPU seconds and peak memory should grow with
the names, and no faster.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import add_result_flags, save_results

ROWS_PER_SPAN = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, nargs="+", default=[100_000, 1_000_000], help="files in the folders")
    parser.add_argument("--quick", action="store_true", help="two small folders: to see that it runs")
    add_result_flags(parser, "folders")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return sys.stdout.write(json.dumps(measure(Path(arguments.measure))) + "\n")
    results = []
    for count in [200, 2000] if arguments.quick else arguments.names:
        with tempfile.TemporaryDirectory() as folder:
            make_folder(Path(folder), count)
            done = subprocess.run(
                [sys.executable, __file__, "--measure", folder], capture_output=True, text=True, check=True
            )
            results.append({"names": count, **json.loads(done.stdout)})
    first = results[0]
    sys.stdout.write(f"{'names':>10}{'CPU s':>9}{'peak MB':>9}{'CPU ratio':>11}{'names ratio':>13}\n")
    for found in results:
        found["cpu_ratio"] = found["cpu_seconds"] / first["cpu_seconds"]
        sys.stdout.write(
            f"{found['names']:>10}{found['cpu_seconds']:>9.2f}{found['peak_mb']:>9}{found['cpu_ratio']:>11.1f}"
            f"{found['names'] / first['names']:>13.1f}\n"
        )
    save_results(arguments, results)


def make_folder(folder: Path, count: int) -> None:
    """A folder of that many empty files, made before the clock starts and long unchanged."""
    for number in range(count // 2):
        for suffix in ("jpg", "txt"):
            os.close(os.open(folder / f"{number:09}.{suffix}", os.O_CREAT | os.O_WRONLY))
    os.utime(folder, (1, 1))


def measure(folder: Path) -> dict:
    """CPU seconds of naming the files of all rows, span by span, and the peak memory of this process in MB."""
    from ppldm.prepare.convert.units import find_units

    before = time.process_time()
    (unit,) = find_units(folder)
    rows = sum(len(unit.input_pieces(span)) // 2 for span in unit.spans(ROWS_PER_SPAN))
    peak_kb = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))
    return {"rows": rows, "cpu_seconds": time.process_time() - before, "peak_mb": peak_kb >> 10}


if __name__ == "__main__":
    main()
