"""Named faults, each with the tests that must catch it: `python tests/mutants/run.py [--area data] [--only NAME …]`.

An area is a file beside this one, a list of

    {"name": "order_every_cycle_like_the_first",        what is wrong, unique in its area
     "file": "ppldm/data/order/rows.py",                     where
     "old": "…", "new": "…",                            text that stands once in the file, and what takes its place
     "tests": "tests/data/order/test_rows.py"}               what must fail: pytest's arguments, separated by spaces

in YAML. The runner copies the tree, sees that the tests pass there, then plants one fault at a time, runs its tests
without the slow ones, and takes it out again. It prints which faults were missed; exit status 1 if more than a tenth
were. Outside CI: each fault takes a start of pytest. tests/test_mutants.py checks that every entry still fits the code.
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
from pathlib import Path
from threading import Lock

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 300  # a fault may hang its tests: that is caught, too
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


def run_tests(tree: Path, tests: str) -> str:
    """`passed`, `failed`, `timed out`, or `broken` where pytest itself could not run."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "timed out"
    return {0: "passed", 1: "failed", 2: "failed"}.get(done.returncode, "broken")


def plant(tree: Path, fault: dict) -> str:
    """Write the fault into the tree; the text of the file before it."""
    path = tree / fault["file"]
    text = path.read_text("utf-8")
    if text.count(fault["old"]) != 1:
        raise SystemExit(f"error: {fault['area']}/{fault['name']}: `old` stands {text.count(fault['old'])} times")
    path.write_text(text.replace(fault["old"], fault["new"]), "utf-8")
    return text


def judge(tree: Path, fault: dict) -> str:
    """`caught`, `missed`, or `broken`."""
    before = plant(tree, fault)
    try:
        outcome = run_tests(tree, fault["tests"])
    finally:
        (tree / fault["file"]).write_text(before, "utf-8")
    return {"passed": "missed", "broken": "broken"}.get(outcome, "caught")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", nargs="*", default=[], help="areas to run (default: all)")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults to run")
    parser.add_argument("--jobs", type=int, default=2, help="trees at a time (default: 2)")
    parser.add_argument("--json", type=Path, help="write the outcome of every fault here")
    arguments = parser.parse_args()
    faults = [fault for fault in read_faults(arguments.area) if not arguments.only or fault["name"] in arguments.only]
    started, lock, outcomes = time.monotonic(), Lock(), []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        trees = deque(Path(folder, str(number)) for number in range(arguments.jobs))
        for tree in trees:
            copy_tree(tree)

        def in_a_tree(work, *details):
            tree = trees.popleft()
            try:
                return work(tree, *details)
            finally:
                trees.append(tree)

        selections = sorted({fault["tests"] for fault in faults})
        sound = dict(zip(selections, pool.map(lambda tests: in_a_tree(run_tests, tests), selections), strict=True))
        for tests, outcome in sound.items():
            if outcome != "passed":
                print(f"{tests}: {outcome} without any fault", flush=True)

        def one(fault):
            found = in_a_tree(judge, fault) if sound[fault["tests"]] == "passed" else "broken"
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
