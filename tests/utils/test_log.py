"""A progress bar follows work that reports in numbers alone, and ends with it."""

import threading
from itertools import chain, repeat

import pytest

from ppldm.utils import log


def test_a_bar_follows_what_is_measured_and_never_passes_the_total(monkeypatch):
    bars, enough = [], threading.Event()
    states = chain([(1, 4), (3, 8), (2, 8)], repeat((99, 8)))
    num_asked = 0

    def measure():
        nonlocal num_asked
        num_asked += 1
        if num_asked > 5:
            enough.set()
        seen.append(bars[0].n)
        return next(states)

    seen, make = [], log.progress
    monkeypatch.setattr(log, "_FOLLOW_SECONDS", 0.001)
    monkeypatch.setattr(log, "progress", lambda **options: bars.append(make(disable=False, **options)) or bars[-1])
    with log.following(measure, desc="work", unit="row"):
        assert enough.wait(30)
    assert seen[:5] == [0, 1, 3, 3, 8] and bars[0].n == bars[0].total == 8
    num_before = num_asked
    with pytest.raises(KeyError), log.following(measure):
        raise KeyError
    assert num_asked <= num_before + 1
