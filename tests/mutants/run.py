"""Named faults, each with the tests that must catch it: `python tests/mutants/run.py [--area data] [--only NAME …]`.

An area is a file beside this one, a list of

    {"name": "order_every_cycle_like_the_first",        what is wrong, unique in its area
     "file": "ppldm/data/order.py",                where
     "old": "…", "new": "…",                            text that stands once in the file, and what takes its place
     "tests": "tests/data/order/test_rows.py"}          what must fail: pytest's arguments, separated by spaces

in YAML. The runner copies the tree, sees that the tests pass there and which lines each of them reaches (reach.py),
then plants one fault at a time, runs its tests, and takes it out again. First come the quickest tests that reach the
changed lines, and the others only where these pass. Slow ones stay out, unless a fault names them one by one; those
that come by turns are all played. It prints which faults were missed; exit status 1 if more than a tenth were. Outside
CI: a fault takes about a second of CPU (warm.py). tests/test_mutants.py checks that every entry still fits the code.
"""

import argparse
import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from reach import changed_lines

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 300  # a fault may hang its tests: that is caught, too
OUTCOMES = {0: "passed", 1: "failed", 2: "failed", -1: "timed out"}  # by pytest's exit status
ALLOWED_SHARE_MISSED = 0.1
NUM_FIRST = 25  # tests that are tried before all the others of a fault


def read_faults(areas=()) -> list[dict]:
    """The faults of the areas (all where none is named), each with its `area`."""
    files = [HERE / f"{area}.yaml" for area in areas] or sorted(HERE.glob("*.yaml"))
    faults = []
    for file in files:  # 7,000 lines: in C, a tenth of the time
        faults += ({"area": file.stem, **fault} for fault in yaml.load(file.read_text("utf-8"), yaml.CSafeLoader) or [])
    return faults


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
        self.folder, self.cpu_s, self.planted = folder, 0.0, 0
        copy_tree(folder)
        compileall.compile_dir(folder / "ppldm", quiet=2)
        environment = {**os.environ, "PYTHONPATH": str(folder), "PPLDM_ALL": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, str(HERE / "warm.py")]
        self.warm = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)

    def run_tests(self, tests: list[str], limit_s: float = LIMIT_S, **more) -> str:
        """`passed`, `failed`, `timed out`, or `broken` where pytest itself could not run."""
        first = [] if more else ["-x"]
        marks = [] if all("::" in test for test in tests) else ["-m", "not slow"]
        arguments = [*first, "-q", *marks, "-p", "no:cacheprovider", *tests]
        line = {"tree": str(self.folder), "arguments": arguments, "limit_s": limit_s, **more}
        print(json.dumps(line), file=self.warm.stdin, flush=True)
        status, cpu_s = self.warm.stdout.readline().split()
        self.cpu_s += float(cpu_s)
        return OUTCOMES.get(int(status), "broken")

    def record(self, files: list[str], watched: dict[str, set[int]]) -> dict[str, dict]:
        """Run all tests of the files: what each of them reaches of the watched lines (reach.py)."""
        target = self.folder / "reached.json"
        target.unlink(missing_ok=True)
        lines = {str(self.folder / file): sorted(watched[file]) for file in watched}
        self.run_tests(files, LIMIT_S * len(files), watched=lines, target=str(target))
        if not target.exists():  # then each selection runs by itself
            return {}
        notes = json.loads(target.read_text())
        for note in notes.values():
            known = [one for one in note["reached"] if one]
            note["anything"] = len(known) < len(note["reached"])
            note["reached"] = {(os.path.relpath(file, self.folder), line) for file, line in known}
        target.unlink()
        return notes

    def plant(self, fault: dict) -> tuple[str, os.stat_result]:
        """Write the fault into the tree; what the file was before it."""
        path = self.folder / fault["file"]
        text, before = path.read_text("utf-8"), path.stat()
        if text.count(fault["old"]) != 1:
            raise SystemExit(f"error: {fault['area']}/{fault['name']}: `old` stands {text.count(fault['old'])} times")
        path.write_text(text.replace(fault["old"], fault["new"]), "utf-8")
        # Python takes bytecode for that of a source by its size and second.
        self.planted += 1
        os.utime(path, (self.planted, self.planted))
        return text, before

    def judge(self, fault: dict, first: list[str]) -> str:
        """`caught`, `missed`, or `broken`. `first`: the tests to begin with."""
        text, before = self.plant(fault)
        try:
            outcome = self.run_tests(first) if first else "passed"
            if outcome in ("passed", "broken"):
                outcome = self.run_tests(fault["tests"].split())
        finally:
            path = self.folder / fault["file"]
            path.write_text(text, "utf-8")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return {"passed": "missed", "broken": "broken"}.get(outcome, "caught")

    def close(self) -> None:
        self.warm.stdin.close()
        self.warm.wait()


def belongs(name: str, tests: str) -> bool:
    """Whether the test `name` is among the arguments of pytest (`-k` is not looked at)."""
    return any(
        name == word or name.startswith((f"{word}::", f"{word}[", f"{word.rstrip('/')}/")) for word in tests.split()
    )


def choose_first(fault: dict, notes: dict[str, dict]) -> list[str]:
    """The tests of a fault that reach its lines, the most likely to fail for their time first; at most NUM_FIRST.

    None where the lines are reached by an import, or by code that no trace sees.
    """
    lines = {(fault["file"], line) for line in fault["lines"]}
    mine = {} if " -k " in fault["tests"] else {n: one for n, one in notes.items() if belongs(n, fault["tests"])}
    surely = {name: one for name, one in mine.items() if lines & one["reached"]}
    # Those that start a process may reach the lines there.
    maybe = {name: one for name, one in mine.items() if lines and one["anything"]} if not surely else {}
    return sorted(surely or maybe, key=lambda name: mine[name]["seconds"])[:NUM_FIRST]


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

        watched = defaultdict(set)
        for fault in faults:
            text = (ROOT / fault["file"]).read_text("utf-8")
            fault["lines"] = changed_lines(text, fault) if fault["file"].endswith(".py") else set()
            watched[fault["file"]] |= fault["lines"]
        selections = sorted({fault["tests"] for fault in faults})
        words = {word for tests in selections for word in tests.split() if word.startswith("tests/")}
        files = {word: word.split("::")[0] for word in words}
        words = [word for word in words if files[word] == word or files[word] not in words]
        modules = sorted(set(files[word] for word in words))
        chunks = [modules[number :: 8 * arguments.jobs] for number in range(8 * arguments.jobs)]
        chunks = [[word for word in sorted(words) if files[word] in chunk] for chunk in chunks if chunk]
        notes = {}
        for found in pool.map(lambda chunk: in_a_tree(Tree.record, chunk, watched), chunks):
            notes |= found
        print(f"{len(notes)} tests recorded after {time.monotonic() - started:.0f} s", flush=True)

        def check(tests):
            """The outcome of a selection without any fault."""
            names = [name for name in notes if belongs(name, tests)]
            if names and " -k " not in tests and not any(notes[name]["failed"] for name in names):
                return "passed"
            return in_a_tree(Tree.run_tests, tests.split())

        sound = dict(zip(selections, pool.map(check, selections), strict=True))
        for tests, outcome in sound.items():
            if outcome != "passed":
                print(f"{tests}: {outcome} without any fault", flush=True)

        def one(fault):
            begun, first, found = time.monotonic(), choose_first(fault, notes), "broken"
            if sound[fault["tests"]] == "passed":
                found = in_a_tree(Tree.judge, fault, first)
            why = ", and no test is seen to reach it" if found == "missed" and fault["lines"] and not first else ""
            with lock:
                seconds = round(time.monotonic() - begun, 1)
                outcomes.append({**fault, "lines": sorted(fault["lines"]), "outcome": found, "why": why, "s": seconds})
                name = f"{fault['area']}/{fault['name']}"
                print(f"{len(outcomes)}/{len(faults)} {time.monotonic() - started:.0f} s {found:7} {name}", flush=True)

        list(pool.map(one, faults))
        used = sum(tree.cpu_s for tree in trees)
    uncaught = [fault for fault in outcomes if fault["outcome"] != "caught"]
    print(f"{len(outcomes) - len(uncaught)} of {len(outcomes)} faults caught; {used:.0f} s of CPU in tests")
    for fault in uncaught:
        print(f"  {fault['outcome']}{fault['why']}: {fault['area']}/{fault['name']}: {fault['file']}; {fault['tests']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    return int(len(uncaught) > ALLOWED_SHARE_MISSED * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
