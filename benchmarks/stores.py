"""What training waits for data from a store:  python benchmarks/stores.py [--quick] [--json [OUT]]

The same run, of a tiny model with loader processes, over the same parts: on disk, and at an S3 server of this machine
that thinks before each answer, with an empty cache (cold) and with the cache that this leaves (warm). The kinds take
turns, and each keeps its turn of most samples a second, so that other load hurts all alike. The first updates, in which
the loaders start and a cold run fetches its first part, are figures of their own.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from results import ROOT, add_result_flags, save_results
from train_step import prepare, prepare_run

sys.path.insert(0, str(ROOT / "tests/helpers"))
KINDS = ("disk", "cold", "warm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=16, help="parts of the data set")
    parser.add_argument("--rows", type=int, default=320, help="photographs in all of them")
    parser.add_argument("--updates", type=int, default=60, help="updates of each run; the first sixth is its start")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--resolution", type=int, default=128, help="side of the pictures")
    parser.add_argument("--workers", type=int, default=2, help="loader processes")
    parser.add_argument("--latency", type=float, default=0.1, help="seconds before each answer of the server")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each kind")
    parser.add_argument("--quick", action="store_true", help="a few rows, once: to see that it runs")
    add_result_flags(parser, "stores")
    arguments = parser.parse_args()
    arguments.networks = ["tiny"]
    if arguments.quick:
        arguments.parts, arguments.rows, arguments.updates, arguments.repeats = 4, 32, 6, 1
    from ppldm.utils.entry import entry

    with entry(), tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), arguments)
    for kind in KINDS:
        found = results[kind]
        sys.stdout.write(
            f"{kind:<6}{found['images_per_second']:>8.1f} images/s, waits {found['data_wait_share']:.1%} "
            f"(at the start {found['start']['data_wait_share']:.1%})\n"
        )
    save_results(arguments, results)


def measure(folder: Path, arguments: argparse.Namespace) -> dict:
    """Figures of each kind of run, and what they are of."""
    from pytest import MonkeyPatch
    from s3_here import empty_bucket, s3_here

    prepare(folder, arguments)
    split(folder, arguments.parts)
    best = {}
    with MonkeyPatch.context() as patch, s3_here() as server, empty_bucket(server, patch):
        patch.setenv("PPLDM_CACHE_DIR", str(folder / "cache"))
        upload(folder / "set")
        server.tell(latency=arguments.latency)
        for _ in range(arguments.repeats):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            for kind in KINDS:
                found = train(folder, kind, arguments)
                best[kind] = max(best.get(kind, found), found, key=lambda one: one["images_per_second"])
    sizes = {name: getattr(arguments, name) for name in ("parts", "rows", "updates", "batch_size", "resolution")}
    return best | sizes | {"workers": arguments.workers, "latency_seconds": arguments.latency}


def split(folder: Path, num_parts: int) -> None:
    """The rows that `prepare` wrote, in so many parts with their indexes."""
    from ppldm.data.filelist import write_filelist
    from ppldm.data.formats.part import Part, write_part

    names, part = [f"part-{number:05}.gz" for number in range(num_parts)], Part(folder / "part-00000.gz")
    rows = [part.read(number) for number in range(len(part))]
    (folder / "set").mkdir()
    for number, name in enumerate(names):
        write_part(folder / "set" / name, rows[number::num_parts])
    write_filelist(folder / "set/all.filelist", names)


def upload(folder: Path) -> None:
    """All files of a folder, to the bucket."""
    from ppldm.utils.store import client

    for path in folder.iterdir():
        client.put(path, f"s3://bucket/{path.name}")


def train(folder: Path, kind: str, arguments: argparse.Namespace) -> dict:
    """Share of time waited and images a second after the first sixth of the updates, and in it."""
    from ppldm.training.train import run_loop

    output, log = folder / kind, arguments.updates // 6
    settings = {"max_steps": arguments.updates, "logging_steps": log, "save_steps": 10 * arguments.updates}
    file_list = folder / "set/all.filelist" if kind == "disk" else "s3://bucket/all.filelist"
    run_loop(prepare_run(folder, arguments, kind, arguments.workers, file_list=file_list, **settings))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    names = ("images_per_second", "data_wait_share")
    start, later = (
        {name: sum(line[name] for line in some) / len(some) for name in names} for some in (lines[:1], lines[1:])
    )
    return {**later, "start": start}


if __name__ == "__main__":
    main()
