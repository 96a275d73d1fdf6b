"""Which tests are played where there is no time for all: every law once, and as many further cases as fit.

    pytest --minutes 10 --seed 7    of each test function one case, drawn by the seed, or 0.06 s of them; then
                                    further ones, by what each took before (durations.json), until that many minutes
                                    on the workers are full
    pytest --shuffle 7              in an order drawn by the seed: the files, and the tests within each
    pytest                          everything, in the order of the files

Tests marked `night` show scale or time, and no law that no other test holds: with --minutes they are left out. Tests
marked `turn(law, several)` hold one law of several kinds of things, dearly: so many of them, drawn by the seed, are
played, and others for another commit. Files that take longest come first, so that workers of pytest-xdist (`-n 2 --dist
loadfile`) end together.
"""

import hashlib
import os
from collections import Counter

import durations
import pytest

ALL = os.environ.get("PPLDM_ALL", "0") not in ("", "0")  # for grids that tests cut themselves
AT_LEAST_S = 0.06  # of each law, however little time there is: three cases of a formula or a flag
LEFT_OUT = pytest.StashKey[Counter]()
SECONDS = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="every law once, and as many further cases as fit in this time")
    parser.addoption("--seed", type=int, default=0, help="with --minutes: another number draws other cases")
    parser.addoption("--shuffle", type=int, help="play in an order drawn by this number")
    parser.addoption("--record", action="store_true", help="measure each test, and refresh the file of durations")


@pytest.hookimpl(trylast=True)  # what -k and -m leave out is gone
def pytest_collection_modifyitems(config, items):
    minutes, shuffle, seed = (config.getoption(name) for name in ("minutes", "shuffle", "seed"))
    expected = durations.Durations.read()
    left_out = Counter()
    if minutes is not None:
        nights = {item.nodeid for item in items if item.get_closest_marker("night")}
        waiting = wait_their_turn(items, seed)
        names = [item.nodeid for item in items if item.nodeid not in nights | waiting]
        taken = choose(names, expected, minutes * 60 * count_workers(config), seed)
        left_out["further cases of laws that are played"] = len(names) - len(taken)
        left_out["of laws that take turns"], left_out["that take long"] = len(waiting), len(nights)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in taken])
        items[:] = [item for item in items if item.nodeid in taken]
    if shuffle is not None:
        items.sort(key=lambda item: (_draw(file_of(item.nodeid), shuffle), _draw(item.nodeid, shuffle)))
    elif count_workers(config) > 1:
        of_file = Counter()
        for item in items:
            of_file[file_of(item.nodeid)] += expected.of(item.nodeid)
        items.sort(key=lambda item: -of_file[file_of(item.nodeid)])  # stable: within a file the order stays
    config.stash[LEFT_OUT] = +left_out
    config.stash[SECONDS] = sum(expected.of(item.nodeid) for item in items) / count_workers(config)


def wait_their_turn(items, seed: int) -> set[str]:
    """The names of tests whose law others of their `turn` hold in this run."""
    laws: dict[tuple[str, int], set[str]] = {}
    marked = [(item.nodeid, mark.args) for item in items if (mark := item.get_closest_marker("turn"))]
    for name, turn in marked:
        laws.setdefault(turn, set()).add(durations.law_of(name))
    played = {turn: sorted(names, key=lambda name: _draw(name, seed))[: turn[1]] for turn, names in laws.items()}
    return {name for name, turn in marked if durations.law_of(name) not in played[turn]}


def count_workers(config) -> int:
    """The processes that play tests, as seen from each of them."""
    worker = getattr(config, "workerinput", None)
    return worker["workercount"] if worker else config.getoption("numprocesses", None) or 1


def choose(names: list[str], expected: durations.Durations, seconds: float, seed: int) -> set[str]:
    """Of each test function one case and AT_LEAST_S of further ones, then as many seconds of these as fit `seconds`."""
    by_law: dict[str, list[str]] = {}
    takes = {name: expected.of(name) for name in names}
    for name in sorted(names, key=lambda name: _draw(name, seed)):
        by_law.setdefault(durations.law_of(name), []).append(name)

    def take(seconds_of_law: float) -> list[str]:
        taken = []
        for cases in by_law.values():
            spent = 0.0
            for number, name in enumerate(cases):
                spent += takes[name]
                if number and spent > seconds_of_law:
                    break
                taken.append(name)
        return taken

    low, high = AT_LEAST_S, sum(takes.values())
    if high <= seconds:
        return set(names)
    for _ in range(30):
        middle = (low + high) / 2
        if sum(map(takes.get, take(middle))) > seconds:
            high = middle
        else:
            low = middle
    return set(take(low))


def file_of(name: str) -> str:
    return name.partition("::")[0]


def _draw(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()
