"""How fast pictures become part files:  python benchmarks/convert.py [--rows 1000] [--json [OUT]]

Makes photographs as JPEG files of about 64 KB (`photographs.py`), as img2dataset lays them out, and converts them in
one process on one core, without start-up. Beside it stands the floor: what decoding each picture once and compressing
its base64 take alone. Each is the best of `--repeats`, by turns, so that other load on the machine strikes both alike.
With `--commands`, also whole commands, their start included: annotate, convert in one process, convert on Spark with
one task at once.
"""

import argparse
import io
import json
import os
import resource
import sys
import tarfile
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pybase64
from commands import Cost, measure_command
from isal import isal_zlib
from photographs import make_rows
from results import add_result_flags, save_results

from ppldm.data.images import decode_pixels
from ppldm.prepare.convert.convert import convert_source

SHARD_ROWS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=int, default=200, help="different pictures to make")
    parser.add_argument("--rows", type=int, default=2000, help="rows to convert, the pictures again and again")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each")
    parser.add_argument("--sources", nargs="+", default=["files", "webdataset"], help="how the rows lie on disk")
    parser.add_argument("--commands", action="store_true", help="also measure whole commands")
    add_result_flags(parser, "convert")
    arguments = parser.parse_args()
    made = make_rows(min(arguments.photographs, arguments.rows))
    rows = [made[i % len(made)] for i in range(arguments.rows)]
    mean_bytes = sum(len(row.image) for row in rows) / len(rows)
    results = {"rows": len(rows), "mean_bytes": round(mean_bytes)}
    with tempfile.TemporaryDirectory() as folder:
        for source in arguments.sources:
            WRITERS[source](Path(folder, source), rows)
        best = {}
        for repeat in range(arguments.repeats):
            measured = {"floor": floor_cpu_sec(rows)}
            for source in arguments.sources:
                measured[source] = convert_cpu_sec(Path(folder, source), Path(folder, f"{source}{repeat}"))
            best = {name: min(seconds, best.get(name, seconds)) for name, seconds in measured.items()}
        commands = measure_commands(Path(folder), rows) if arguments.commands else {}
    results |= {f"{name}_rows_per_sec": round(len(rows) / seconds) for name, seconds in best.items()}
    results["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)
    sys.stdout.write(f"{len(rows)} rows of {mean_bytes / 1000:.0f} KB, one core, {results['peak_gb']} GB\n")
    for name, seconds in best.items():
        share = f"{best['floor'] / seconds:6.0%} of the floor" if name != "floor" else "  decode, base64, deflate alone"
        sys.stdout.write(f"{name:<12}{len(rows) / seconds:8.0f} rows/s{share}\n")
    for name, cost in commands.items():
        results[name] = {"seconds": cost.seconds, "cpu_seconds": cost.cpu_seconds}
        sys.stdout.write(
            f"{name:<46}per 1,000 rows {cost.seconds / len(rows) * 1000:6.2f} s, "
            f"{cost.cpu_seconds / len(rows) * 1000:6.2f} s of a core\n"
        )
    save_results(arguments, results)


def floor_cpu_sec(rows) -> float:
    """Decoding each picture and compressing its base64, as in parts."""
    start = time.process_time()
    for row in rows:
        decode_pixels(row.image)
        isal_zlib.compress(pybase64.b64encode(row.image), 1, -15)
    return time.process_time() - start


def convert_cpu_sec(source: Path, out: Path) -> float:
    """CPU seconds of the conversion; it waits for the disk besides, which depends on the disk."""
    start = time.process_time()
    convert_source(source, out, num_workers=1)
    return time.process_time() - start


def measure_commands(folder: Path, rows) -> dict[str, Cost]:
    """Of each command, on img2dataset's `files`."""
    source = folder / "images"
    write_files(source, rows)
    commands = {
        "annotate": ["annotate", source],
        "convert": ["convert", source, "--out", folder / "here", "--num-workers", 1],
        "convert --master local[1]": ["convert", source, "--out", folder / "spark", "--master", "local[1]"],
    }
    return {f"ppldm {name}": measure_command("ppldm", words) for name, words in commands.items()}


def write_files(folder: Path, rows) -> None:
    """img2dataset's `files`."""
    for number, row in enumerate(rows):
        shard = folder / f"{number // SHARD_ROWS:05}"
        shard.mkdir(parents=True, exist_ok=True)
        for suffix, data in members(row):
            (shard / f"{number:09}.{suffix}").write_bytes(data)


def write_webdataset(folder: Path, rows) -> None:
    """img2dataset's `webdataset`."""
    folder.mkdir()
    for first in range(0, len(rows), SHARD_ROWS):
        with tarfile.open(folder / f"{first // SHARD_ROWS:05}.tar", "w") as tar:
            for number, row in enumerate(rows[first : first + SHARD_ROWS], start=first):
                for suffix, data in members(row):
                    info = tarfile.TarInfo(f"{number:09}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def members(row):
    """(suffix, content) of the files of a row."""
    meta = {"url": "http://example.com/1.jpg", "caption": row.caption, "width": row.meta["width"], "similarity": 0.3}
    return ("jpg", row.image), ("txt", row.caption.encode()), ("json", json.dumps(meta).encode())


WRITERS = {"files": write_files, "webdataset": write_webdataset}

if __name__ == "__main__":
    main()
