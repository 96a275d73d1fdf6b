"""How fast rows of ordinary gzip are read, beside our own parts:  python benchmarks/packed_parts.py [--json OUT]

Writes the same rows twice, with a gzip member a row and as one member (`gzip -6`), and reads both in the windowed order
of training: the rows alone, and whole samples at 256 pixels. Turns alternate, each keeps its best; CPU time of one
process, which other load on the machine hurts little. Prints the share of a part that its index and seek points take,
and how fast ordinary gzip is, our own parts being 1.
"""

import argparse
import gzip
import sys
import tempfile
import time
from pathlib import Path

from photographs import make_rows
from results import add_result_flags, save_results

from ppldm.data.dataset import TextImageDataset
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.index.entries import PACKED_LINES
from ppldm.data.formats.part import Part, write_part
from ppldm.data.inputs import Normals, Pixels
from ppldm.data.order.rows import Mix
from ppldm.utils.rng import Stream

INPUTS = {"pixel_values": Pixels(), "posterior_noise": Normals(Stream.POSTERIOR, 4, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000, help="rows of the part")
    parser.add_argument("--photographs", type=int, default=50, help="different pictures among them")
    parser.add_argument("--level", type=int, default=6, help="of gzip")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    parser.add_argument("--quick", action="store_true", help="a few rows, once: to see that it runs")
    add_result_flags(parser, "packed_parts")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.photographs, arguments.repeats = 20, 4, 1
    with tempfile.TemporaryDirectory() as folder:
        results = compare(Path(folder), arguments)
    lines = [
        f"{results['rows']} rows of {results['mean_row_bytes'] / 1000:.0f} kB: index and seek points are "
        f"{results['sidecar_share']:.1%} of the part; indexed at {results['index_mb_per_second']:.0f} MB/s",
        *(
            f"{name:<8}{found['own']['us']:8.0f} us own{found['packed']['us']:8.0f} us ordinary gzip"
            f"{found['packed']['ratio']:8.2f}"
            for name, found in results["reading"].items()
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    save_results(arguments, results)


def compare(folder: Path, arguments: argparse.Namespace) -> dict:
    """All numbers, as JSON has them."""
    pictures = make_rows(arguments.photographs)
    write_part(folder / "own.gz", (pictures[number % len(pictures)] for number in range(arguments.rows)))
    text = gzip.decompress((folder / "own.gz").read_bytes())
    (folder / "packed.gz").write_bytes(gzip.compress(text, arguments.level))
    Part(folder / "packed.gz")  # the first time compiles
    (folder / "packed.gz.idx").unlink()
    before = time.process_time()
    part = Part(folder / "packed.gz")
    seconds = time.process_time() - before
    assert part._index.kind == PACKED_LINES
    sidecar = sum((folder / f"packed.gz.{suffix}").stat().st_size for suffix in ("idx", "points"))
    datasets = {name: open_dataset(folder, name) for name in ("own", "packed")}
    _, rows = Mix(datasets["own"].list_sizes, None, 0).samples(0, arguments.rows)
    read = {
        "rows": lambda dataset: [dataset.read_row(row) for row in rows.tolist()],
        "samples": lambda dataset: [dataset[0, row] for row in rows.tolist()[:200]],
    }
    return {
        "rows": arguments.rows,
        "level": arguments.level,
        "mean_row_bytes": len(text) / arguments.rows,
        "sidecar_share": sidecar / (folder / "packed.gz").stat().st_size,
        "index_mb_per_second": len(text) / 1e6 / seconds,
        "reading": {name: take_turns(datasets, function, arguments.repeats) for name, function in read.items()},
    }


def open_dataset(folder: Path, name: str) -> TextImageDataset:
    """One part as training reads it."""
    write_filelist(folder / f"{name}.filelist", [f"{name}.gz"])
    return TextImageDataset(read_sources(folder / f"{name}.filelist"), INPUTS, 256, 0)


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
