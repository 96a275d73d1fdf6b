"""What each test takes, in seconds: kept in durations.json, and made again where all tests are played (--record).

A law, which is a test function, has one number for each of its cases, and a case that takes far longer one of its own;
what is not named takes next to nothing. On two quiet cores; where a test waits for its processes, so does the number.
"""

import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "durations.json"
LITTLE_S = 0.02  # of what the file does not name: less than NAMED_S
NAMED_S = 0.1
MOST_UNKNOWN = 0.05  # of a run's seconds, in tests that were taken for free and were not: then too many are chosen
OWN_NUMBER = 2.0  # times the mean of its law, from which on a case has its own number
# What a test may take by itself, without what it shares with others, on free cores of the machine that the file is of.
BUDGETS_S = {"quick": 2.0, "night": math.inf}
BUDGET_S = 20.0  # of all others
STARTED, OWN = pytest.StashKey[float](), pytest.StashKey[float]()


def law_of(name: str) -> str:
    """The test function of a case."""
    return name.partition("[")[0]


def missing_laws(names, root: Path) -> set[str]:
    """The test functions of cases that are not there any more."""
    by_file = defaultdict(set)
    for law in map(law_of, names):
        by_file[root / law.partition("::")[0]].add(law)
    texts = {path: path.read_text("utf-8") if path.is_file() else "" for path in by_file}
    pairs = ((path, law) for path, laws in by_file.items() for law in laws)
    return {law for path, law in pairs if f"def {law.rpartition('::')[2]}(" not in texts[path]}


@dataclass(frozen=True)
class Durations:
    """Seconds by the name of a law or a case."""

    seconds: dict[str, float]

    @classmethod
    def read(cls) -> "Durations":
        return cls(json.loads(FILE.read_text("utf-8")))

    def of(self, name: str) -> float:
        """What a case is expected to take."""
        return self.seconds.get(name) or self.seconds.get(law_of(name), LITTLE_S)

    @classmethod
    def measured(cls, found: dict[str, float]) -> "Durations":
        """From seconds by case: short enough to be read, and no number moves by the noise of a machine."""
        by_law = defaultdict(dict)
        for name, seconds in found.items():
            by_law[law_of(name)][name] = seconds
        kept = {}
        for law, cases in by_law.items():
            mean = sum(cases.values()) / len(cases)
            own = {name: s for name, s in cases.items() if s > max(OWN_NUMBER * mean, 10 * NAMED_S)}
            rest = [seconds for name, seconds in cases.items() if name not in own]
            kept |= {law: sum(rest) / len(rest)} if rest else {}
            kept |= own
        return cls({name: _round(seconds) for name, seconds in sorted(kept.items()) if seconds >= NAMED_S})

    def write(self) -> None:
        lines = ",\n".join(f" {json.dumps(name)}: {seconds:g}" for name, seconds in self.seconds.items())
        FILE.write_text(f"{{\n{lines}\n}}\n", "utf-8")


def _round(seconds: float) -> float:
    """To a step of a quarter of its size."""
    step = 2.0 ** (math.floor(math.log2(seconds)) - 2)
    return float(f"{round(seconds / step) * step:.3g}")


class Recorder:
    """Measures every test; where `write` is true, the file is made again, and a test over its budget fails the run."""

    def __init__(self, write: bool, crowd: float) -> None:
        """crowd: processes that play for each core, from which on each of them is slower."""
        self.write, self.crowd = write, max(1.0, crowd)
        self.found, self.own, self.budgets, self.late = {}, {}, {}, {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        item.stash[STARTED] = time.monotonic()
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if call.when == "call":
            item.stash[OWN] = call.duration
        if call.when == "teardown":
            budget = next((s for name, s in BUDGETS_S.items() if item.get_closest_marker(name)), BUDGET_S)
            seconds = time.monotonic() - item.stash[STARTED]
            report.user_properties += [("seconds", seconds), ("own", item.stash.get(OWN, 0.0)), ("budget", budget)]

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            told = dict(report.user_properties)
            for kept, name in ((self.found, "seconds"), (self.own, "own"), (self.budgets, "budget")):
                kept[report.nodeid] = told[name]

    def over_budget(self) -> dict[str, float]:
        """The cases that took longer than a test may, on a machine as fast as the one that the file is of."""
        before = Durations.read()
        known = [name for name in self.found if before.of(name) > LITTLE_S]
        slower = sum(self.found[name] for name in known) / max(sum(map(before.of, known)), 1e-9)
        own = {name: seconds / self.crowd / max(1.0, slower) for name, seconds in self.own.items()}
        return {name: seconds for name, seconds in own.items() if seconds > self.budgets[name]}

    def pytest_sessionfinish(self, session):
        if not self.write or hasattr(session.config, "workerinput"):
            return
        before = Durations.read().seconds
        made_anew = {law_of(name) for name in self.found} | missing_laws(before, session.config.rootpath)
        kept = {name: seconds for name, seconds in before.items() if law_of(name) not in made_anew}
        self.late = self.over_budget()
        Durations(dict(sorted((kept | Durations.measured(self.found).seconds).items()))).write()
        if self.late and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for name, seconds in sorted(self.late.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(
                f"over its budget of {self.budgets[name]:g} s: {name}: {seconds:.1f} s", red=True
            )
        expected = Durations.read()
        unknown_s = sum(s for name, s in self.found.items() if expected.of(name) == LITTLE_S and s > NAMED_S)
        if unknown_s > MOST_UNKNOWN * sum(self.found.values()):
            words = "were in tests that durations.json does not know; --record writes them down"
            terminalreporter.write_line(f"{unknown_s:.0f} s {words}")
