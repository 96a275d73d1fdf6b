"""Does the proof ever fail for nothing?  python benchmarks/plays.py [--count 20] [--json [OUT]]

Plays what `run_scripts/test.sh` plays, so many times in a row, each with another number for its cases: of every four
one in a shuffled order, and one beside a process for each core that does nothing else. With --json each play is kept:
commit, processor, Python, number of its cases, order, load, minutes, tests that passed, those that failed, and how many
cores all other processes of the machine kept busy meanwhile; and the same command again goes on until there are
`--count`.
"""

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
from results import add_result_flags, commit, processor, save_results

ROOT = Path(__file__).resolve().parents[1]
PLAY = """
source run_scripts/lib.sh; source run_scripts/proof.sh; make_venv
export PPLDM_SEED=$0
play --minutes "$MINUTES" --seed "$PPLDM_SEED" {order}
"""
BURN = "while True: pass"


def plan(number: int) -> tuple[bool, bool]:
    """Of a play by its number: is its order shuffled, and do other processes burn the cores?"""
    return number % 4 == 1, number % 4 == 3


def others_seconds() -> float:
    """Seconds of CPU that this machine used so far, without those of processes that this one began and waited for."""
    times, own = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.user + times.nice + times.system - own.ru_utime - own.ru_stime


def play(number: int, seed: int) -> dict:
    """One line of the log."""
    shuffled, loaded = plan(number)
    order = f"--shuffle {seed}" if shuffled else ""
    started, others = time.monotonic(), others_seconds()
    with ExitStack() as burners:
        for _ in range((os.cpu_count() or 1) * loaded):
            burner = subprocess.Popen([sys.executable, "-c", BURN])
            burners.callback(burner.wait)
            burners.callback(burner.kill)
        command = ["bash", "-c", PLAY.format(order=order), str(seed)]
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - started
    if done.returncode:
        print(done.stdout, flush=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR|failed:) (\S+)", done.stdout, re.MULTILINE)
    return {
        "commit": commit(),
        "processor": processor(),  # a log may be of several machines
        "python": platform.python_version(),
        "seed": seed,
        "order": f"shuffled by {seed}" if shuffled else "longest files first",
        "load": "a burning process for each core" if loaded else "nothing else",
        "minutes": round(seconds / 60, 1),
        "cores_of_others": round((others_seconds() - others) / seconds, 2),
        "status": done.returncode,
        "passed": int(passed[1]) if passed else 0,
        "failed": sorted(set(failed)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="plays in all")
    add_result_flags(parser, "plays")
    arguments = parser.parse_args()
    path = Path(arguments.json) if arguments.json else None
    plays = json.loads(path.read_text())["results"] if path and path.is_file() else []
    while len(plays) < arguments.count:
        plays.append(play(len(plays), 1 + len(plays)))
        save_results(arguments, plays)
        print(f"{len(plays)} of {arguments.count}: {json.dumps(plays[-1])}", flush=True)
    print(f"{len(plays)} plays, {sum(bool(one['status']) for one in plays)} with a failure")


if __name__ == "__main__":
    main()
