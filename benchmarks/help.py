"""What `ppldm --help` and each command's help take:  python benchmarks/help.py [--json]

Each is started --runs times, Python's own start included. `seconds` is the least by the clock; `cpu_seconds` the least
that cores worked, which other work on the machine changes less.
"""

import argparse
import os
import subprocess
import sys
import time

from results import add_result_flags, save_results

from ppldm.cli.main import COMMANDS

LIMIT_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    add_result_flags(parser, "help")
    arguments = parser.parse_args()
    found = {}
    for name in ("", *COMMANDS):
        costs = [measure([*name.split(), "--help"]) for _ in range(arguments.runs)]
        seconds, cpu_seconds = (round(min(column), 3) for column in zip(*costs, strict=True))
        found[f"ppldm {name}".strip()] = {"seconds": seconds, "cpu_seconds": cpu_seconds}
        late = f"  OVER {LIMIT_S}" if cpu_seconds > LIMIT_S else ""
        print(f"{seconds:7.3f} s  {cpu_seconds:7.3f} CPU s  ppldm {name}{late}", flush=True)
    save_results(arguments, found)


def measure(words: list[str]) -> tuple[float, float]:
    """(seconds, CPU seconds) of one command line."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "ppldm", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"ppldm {' '.join(words)} failed; run it to see why")
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
