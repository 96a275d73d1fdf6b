"""Which tests reach which lines: a plugin of pytest that notes it, and the lines that a fault changes.

Only the lines asked for are watched, so that a run takes little longer. A test that starts another process may reach
any line. What a fixture of a module or a session reaches counts for all the tests that use it.
"""

import ast
import json
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}  # audit events


class Reach:
    """Notes for each test the watched lines that it reaches, how long it takes and whether it passes."""

    def __init__(self, watched: dict[str, list[int]], target: Path) -> None:
        self.watched = {file: frozenset(lines) for file, lines in watched.items()}
        self.target = target
        self.of_code = {}
        self.reached = set()  # of the test or shared fixture that runs now: file and line, or None for any
        self.shared, self.items, self.tests = defaultdict(set), {}, {}

    def start(self) -> None:
        sys.addaudithook(lambda event, _: self.reached.add(None) if event in STARTS else None)
        sys.settrace(self._enter)
        threading.settrace(self._enter)

    def _enter(self, frame, event, _):
        code = frame.f_code
        if (lines := self.of_code.get(code)) is None:
            watched = self.watched.get(code.co_filename, frozenset())
            lines = self.of_code[code] = watched & {line for _, _, line in code.co_lines()}
        return self._line if lines else None

    def _line(self, frame, event, _):
        if event == "line" and frame.f_lineno in self.of_code[frame.f_code]:
            self.reached.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.reached, started = set(), time.perf_counter()
        note = self.tests[item.nodeid] = {"failed": False, "reached": self.reached}
        self.items[item.nodeid] = item.fixturenames
        done = yield
        note["seconds"] = time.perf_counter() - started
        return done

    def pytest_runtest_logreport(self, report):
        self.tests[report.nodeid]["failed"] |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        outer, self.reached = self.reached, self.shared[fixturedef.argname]
        try:
            return (yield)
        finally:
            outer |= self.reached
            self.reached = outer

    def pytest_sessionfinish(self):
        sys.settrace(None)
        for name, note in self.tests.items():
            note["reached"] = note["reached"].union(*(self.shared[fixture] for fixture in self.items[name]))
            note["reached"] = sorted(note["reached"], key=str)
        self.target.write_text(json.dumps(self.tests))


def changed_lines(text: str, fault: dict) -> set[int]:
    """The lines that tell by a trace whether a fault is reached; none where it acts when its module is imported.

    A statement over several lines counts as one.
    """
    old, new = fault["old"], fault["new"]
    same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    rest = min(len(old), len(new)) - same
    tail = next((n for n in range(rest) if old[-1 - n] != new[-1 - n]), rest)
    start = text.index(old)
    first = text.count("\n", 0, start + same) + 1
    last = text.count("\n", 0, max(start + len(old) - tail, start + same + 1) - 1) + 1
    found, inner = set(), False
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner |= node.body[0].lineno <= first and last <= node.end_lineno
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = node.end_lineno if body is None else max(node.lineno, body[0].lineno - 1)
            if node.lineno <= last and first <= end:
                found |= set(range(node.lineno, end + 1))
    return found if inner else set()
