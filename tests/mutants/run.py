"""Named faults, each with the tests that must catch it: `python tests/mutants/run.py [--area data] [--only NAME …]`.

An area is a file beside this one, a list of

    {"name": "order_every_cycle_like_the_first",        what is wrong, unique in its area
     "file": "ppldm/data/order/rows.py",                where
     "old": "…", "new": "…",                            text that stands once in the file, and what takes its place
     "tests": "tests/data/order/test_rows.py"}          what must fail: pytest's arguments, separated by spaces

in YAML. The runner copies the tree, sees that the tests pass there, then plants one fault at a time, runs its tests
without the slow ones, and takes it out again. It prints which faults were missed; exit status 1 if more than a tenth
were. Outside CI: a fault takes about three seconds (warm.py). tests/test_mutants.py checks that every entry still fits
the code.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Lock

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 300  # a fault may hang its tests: that is caught, too
OUTCOMES = {0: "passed", 1: "failed", 2: "failed", -1: "timed out"}  # by pytest's exit status
ALLOWED_SHARE_MISSED = 0.1


def read_faults(areas=()) -> list[dict]:
    """The faults of the areas (all where none is named), each with its `area`."""
    files = [HERE / f"{area}.yaml" for area in areas] or sorted(HERE.glob("*.yaml"))
    return [{"area": file.stem, **fault} for file in files for fault in yaml.safe_load(file.read_text("utf-8")) or []]


def copy_tree(target: Path) -> None:
    """The files that git knows or would add, so that tests find what they find in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


class Tree:
    """A copy of the repository, with a process that runs tests in it (warm.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_tree(folder)
        command, environment = [sys.executable, str(HERE / "warm.py")], {**os.environ, "PYTHONPATH": str(folder)}
        self.warm = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)

    def run_tests(self, tests: str, limit_s: float = LIMIT_S) -> str:
        """`passed`, `failed`, `timed out`, or `broken` where pytest itself could not run."""
        arguments = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests.split()]
        line = {"tree": str(self.folder), "arguments": arguments, "limit_s": limit_s}
        print(json.dumps(line), file=self.warm.stdin, flush=True)
        return OUTCOMES.get(int(self.warm.stdout.readline()), "broken")

    def plant(self, fault: dict) -> str:
        """Write the fault into the tree; the text of the file before it."""
        path = self.folder / fault["file"]
        text = path.read_text("utf-8")
        if text.count(fault["old"]) != 1:
            raise SystemExit(f"error: {fault['area']}/{fault['name']}: `old` stands {text.count(fault['old'])} times")
        path.write_text(text.replace(fault["old"], fault["new"]), "utf-8")
        return text

    def judge(self, fault: dict) -> str:
        """`caught`, `missed`, or `broken`."""
        before = self.plant(fault)
        try:
            outcome = self.run_tests(fault["tests"])
        finally:
            (self.folder / fault["file"]).write_text(before, "utf-8")
        return {"passed": "missed", "broken": "broken"}.get(outcome, "caught")

    def close(self) -> None:
        self.warm.stdin.close()
        self.warm.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", nargs="*", default=[], help="areas to run (default: all)")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults to run")
    parser.add_argument("--jobs", type=int, default=2, help="trees at a time (default: 2)")
    parser.add_argument("--json", type=Path, help="write the outcome of every fault here")
    arguments = parser.parse_args()
    faults = [fault for fault in read_faults(arguments.area) if not arguments.only or fault["name"] in arguments.only]
    started, lock, outcomes = time.monotonic(), Lock(), []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pool = stack.enter_context(ThreadPoolExecutor(arguments.jobs))
        trees = deque(Tree(Path(folder, str(number))) for number in range(arguments.jobs))
        stack.callback(lambda: [tree.close() for tree in trees])

        def in_a_tree(work, *details):
            tree = trees.popleft()
            try:
                return work(tree, *details)
            finally:
                trees.append(tree)

        selections = sorted({fault["tests"] for fault in faults})
        sound = dict.fromkeys(selections, "passed")
        together = " ".join(sorted({test for tests in selections for test in tests.split()}))
        if in_a_tree(Tree.run_tests, together, LIMIT_S * len(selections)) != "passed":  # then one by one
            sound = dict(zip(selections, pool.map(partial(in_a_tree, Tree.run_tests), selections), strict=True))
        for tests, outcome in sound.items():
            if outcome != "passed":
                print(f"{tests}: {outcome} without any fault", flush=True)

        def one(fault):
            found = in_a_tree(Tree.judge, fault) if sound[fault["tests"]] == "passed" else "broken"
            with lock:
                outcomes.append({**fault, "outcome": found})
                name = f"{fault['area']}/{fault['name']}"
                print(f"{len(outcomes)}/{len(faults)} {time.monotonic() - started:.0f} s {found:7} {name}", flush=True)

        list(pool.map(one, faults))
    uncaught = [fault for fault in outcomes if fault["outcome"] != "caught"]
    print(f"{len(outcomes) - len(uncaught)} of {len(outcomes)} faults caught")
    for fault in uncaught:
        print(f"  {fault['outcome']}: {fault['area']}/{fault['name']}: {fault['file']}; {fault['tests']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    return int(len(uncaught) > ALLOWED_SHARE_MISSED * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
