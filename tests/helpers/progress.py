"""What whoever runs the tests is told: how long it takes, what is left, and at the end what was not played and why."""

import sys
import time
from collections import Counter

import durations
import pytest
import sampling

LINE_EVERY_S = 30.0  # where nobody looks at a terminal
NEED = "that need "  # of reasons why something was not played, which are told together


class Progress:
    """In the process that the user started, beside pytest's own reporter, in place of its dots."""

    def __init__(self, config) -> None:
        self.config, self.expected = config, durations.Durations.read()
        self.started = self.said = time.monotonic()
        self.num_tests = self.num_done = self.num_failed = 0
        self.total = 0.0
        self.left: Counter[str] = Counter()  # expected seconds, by file
        self.left_out: Counter[str] = Counter()

    @property
    def terminal(self):
        return self.config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        if report.passed:
            return ("passed", "", "PASSED") if report.when == "call" else ("", "", "")
        if report.skipped:
            return "skipped", "", "SKIPPED"
        return ("failed", "", "FAILED") if report.when == "call" else ("error", "", "ERROR")

    def pytest_collection_finish(self, session):
        self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self._begin(ids)

    def _begin(self, names: list[str]) -> None:
        if self.num_tests:  # each worker has them all
            return
        workers = sampling.count_workers(self.config)
        self.num_tests, self.started = len(names), time.monotonic()
        for name in names:
            self.left[sampling.file_of(name)] += self.expected.of(name)
        self.total = self.left.total()
        beside = f" by {workers} processes" if workers > 1 else ""
        self.terminal.write_line(f"{self.num_tests:,} tests{beside}: about {_time(self._expected_left())}")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.num_failed += 1
            self.terminal.ensure_newline()
            self.terminal.write_line(f"failed: {report.nodeid}", red=True)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.left_out[_reason(report.longrepr[2])] += 1
        if report.when == "teardown":
            self.left[sampling.file_of(report.nodeid)] -= self.expected.of(report.nodeid)
            self.num_done += 1
            self._tell()

    def pytest_collectreport(self, report):
        if report.skipped and isinstance(report.longrepr, tuple):
            self.left_out[f"files of tests {_reason(report.longrepr[2])}"] += 1

    def _tell(self) -> None:
        now, on_terminal = time.monotonic(), sys.stdout.isatty()
        if now - self.said < (0.5 if on_terminal else LINE_EVERY_S):
            return
        self.said = now
        text = f"{self.num_done:,} of {self.num_tests:,} tests, {_time(self.time_left(now))} left"
        text += f", {self.num_failed} failed" * bool(self.num_failed)
        self.terminal.rewrite(text, erase=True) if on_terminal else self.terminal.write_line(text)

    def time_left(self, now: float) -> float:
        """Seconds, by how fast this machine has been until now; first by what the file of durations says."""
        done = self.total - self.left.total()
        own = min(1.0, 10 * done / max(self.total, 1e-9))  # a tenth of them tells how fast it is
        pace = sampling.count_workers(self.config) * (now - self.started) / max(done, 1e-9)
        return self._expected_left() * (own * pace + 1 - own)

    def _expected_left(self) -> float:
        """Seconds by the file of durations. Where a worker plays whole files, nothing ends before the longest one."""
        whole = self.config.getoption("dist", None) == "loadfile"
        longest = max(self.left.values(), default=0.0) if whole else 0.0
        return max(self.left.total() / sampling.count_workers(self.config), longest)

    def pytest_testnodedown(self, node):
        """A worker has ended."""
        told = getattr(node, "workeroutput", {}).get("left_out")
        self.left_out |= Counter(told or {})

    def pytest_terminal_summary(self, terminalreporter):
        self.left_out |= self.config.stash.get(sampling.LEFT_OUT, Counter())
        if self.left_out:
            terminalreporter.ensure_newline()
            terminalreporter.write_line(
                f"{'not played' if sampling.ALL else 'left to --all'}: {_listed(self.left_out)}"
            )


class Worker:
    """In a process that pytest-xdist started."""

    def __init__(self, config) -> None:
        self.config = config

    @pytest.hookimpl(hookwrapper=True)
    def pytest_report_to_serializable(self):
        """What a test printed may hold names that are not UTF-8, which the way to the first process does not take."""
        outcome = yield
        outcome.force_result(_in_utf8(outcome.get_result()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self):
        self.config.workeroutput["left_out"] = dict(self.config.stash.get(sampling.LEFT_OUT, Counter()))


def _in_utf8(value):
    """The value of lists and dicts with texts that can be encoded."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_in_utf8(name): _in_utf8(one) for name, one in value.items()}
    return type(value)(map(_in_utf8, value)) if isinstance(value, list | tuple) else value


def _reason(text: str) -> str:
    """Of a skip, as it is said behind a number: what is needed (needs.need), or why else."""
    text = text.removeprefix("Skipped: ").partition(" (")[0]
    return NEED + text.removeprefix("needs ").partition(":")[0] if text.startswith("needs ") else f"skipped: {text}"


def _listed(left_out: Counter[str]) -> str:
    """'30 further cases of laws that are played; 12 that need PyTorch, wandb'"""
    counts, needed = Counter(), {}
    for reason, count in left_out.items():
        kind, need, what = reason.partition(NEED)
        counts[kind + need] += count
        needed.setdefault(kind + need, []).append(what)
    return "; ".join(f"{count:,} {kind}{', '.join(sorted(needed[kind]))}" for kind, count in counts.most_common())


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
