"""What `ppldm evaluate --watch` costs the run beside it:  python benchmarks/watcher.py [--json [OUT]]

A training process on one thread, and a watcher that draws pictures of its checkpoint on another. The watcher is stopped
and let go in turns of a few updates, so that other load on the machine hurts both kinds alike; the figures are medians
of the updates' wall time. The bar, at most 2 %, is for machines with a free core: there must be two, and nothing else
running.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from results import add_result_flags, save_results
from train_step import our_step, prepare, prepare_run

MOST_COST = 0.02
WORKING_SECONDS = 20  # of CPU time, after which a watcher has loaded its model and draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="turns of each kind")
    parser.add_argument("--steps", type=int, default=5, help="updates of a turn")
    parser.add_argument("--networks", nargs=1, default=["tiny"], choices=("tiny", "middle"))
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--resolution", type=int, default=128, help="side of the pictures, 8 times the latents")
    parser.add_argument("--rows", type=int, default=64, help="photographs to make; they are read again and again")
    parser.add_argument("--quick", action="store_true", help="a few updates: to see that it runs")
    add_result_flags(parser, "watcher")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.steps, arguments.rows, arguments.resolution = 2, 2, 16, 48
    os.environ |= {"OMP_NUM_THREADS": "1"}
    from ppldm.utils.entry import entry

    with entry(), tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), arguments)
    lines = [f"{words:<16}{results[kind]:>10.4f} s an update" for kind, words in KINDS.items()]
    held = "held" if results["cost"] <= MOST_COST else "NOT HELD"
    lines += [f"cost {results['cost']:+.1%} (bar: at most {MOST_COST:.0%}): {held}"]
    sys.stdout.write("\n".join([*lines, ""]))
    save_results(arguments, results)


KINDS = {"alone": "alone", "watched": "with a watcher"}


def measure(folder: Path, arguments: argparse.Namespace) -> dict:
    """Medians of both kinds of updates, in seconds, and what the watcher adds."""
    from ppldm.training.checkpoint import TrainerState

    prepare(folder, arguments)
    run = prepare_run(folder, arguments, "run", workers=1)
    step, seconds = our_step(run), {kind: [] for kind in KINDS}
    with closing(iter(run.batches())) as batches:
        for _ in range(2):
            step(next(batches))
        run.save(TrainerState(global_step=2, max_steps=run.max_steps))
        watcher = start_watcher(folder, arguments.rows)
        try:
            wait_until_it_works(watcher, folder / "watcher.log")
            for turn in range(2 * arguments.turns):
                kind = ("alone", "watched")[turn % 2]
                watcher.send_signal(signal.SIGSTOP if kind == "alone" else signal.SIGCONT)
                step(next(batches))  # what the change itself costs is nobody's
                for _ in range(arguments.steps):
                    batch, started = next(batches), time.perf_counter()
                    step(batch)
                    seconds[kind].append(time.perf_counter() - started)
            if watcher.poll() is not None:
                sys.exit("the watcher had drawn all pictures before the end; use fewer --turns")
        finally:
            watcher.kill()
            watcher.wait()
    found = {kind: statistics.median(times) for kind, times in seconds.items()}
    return {**found, "cost": found["watched"] / found["alone"] - 1, "updates": len(seconds["alone"])}


def start_watcher(folder: Path, num_rows: int) -> subprocess.Popen:
    """One that has more to draw than this benchmark lasts."""
    asked = ["--against", folder / "train.filelist", "--num-samples", str(1000 * num_rows), "--metrics", "frechet"]
    command = [sys.executable, "-m", "ppldm", "evaluate", "--watch", folder / "run", *asked]
    log = (folder / "watcher.log").open("w")
    return subprocess.Popen([*map(str, command)], stdout=log, stderr=subprocess.STDOUT)


def wait_until_it_works(watcher: subprocess.Popen, log: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    while watcher.poll() is None:
        fields = Path(f"/proc/{watcher.pid}/stat").read_text().rpartition(")")[2].split()
        if (int(fields[11]) + int(fields[12])) / ticks > WORKING_SECONDS:
            return
        time.sleep(0.5)
    sys.exit(f"the watcher ended before it was to be measured:\n{log.read_text()}")


if __name__ == "__main__":
    main()
