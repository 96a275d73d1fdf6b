"""Copies among any number of values, in bounded memory."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppldm.inspect import measure as facts
from ppldm.inspect.measure import Copies

VALUES = st.lists(st.integers(0, 40), max_size=120)


def count(values) -> Copies:
    found = Copies()
    for value in values:
        found.add(str(value))
    return found


@given(VALUES)
def test_few_values_are_counted_exactly(values):
    counts = Counter(values)
    assert count(values).report() == {
        "rows": len(values),
        "distinct": len(counts),
        "repeated": sum(n > 1 for n in counts.values()),
        "extra": len(values) - len(counts),
        "sampled_share": 1.0,
    }


@given(VALUES, st.randoms(use_true_random=False), st.integers(0, 4))
def test_neither_order_nor_split_matters(values, random, quarters):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "MOST", 4)
        whole, shuffled = count(values), random.sample(values, len(values))
        cut = quarters * len(values) // 4
        first, second = count(shuffled[:cut]), count(shuffled[cut:])
        first.merge(second)
    assert first == whole and len(whole.counts) <= 4
    kept = {value for value in values if count([value]).counts.keys() & whole.counts.keys()}
    assert sorted(whole.counts.values()) == sorted(n for value, n in Counter(values).items() if value in kept)


def test_many_values_are_estimated(monkeypatch):
    monkeypatch.setattr(facts, "MOST", 1024)
    report = count([*range(20_000), *range(0, 20_000, 4)]).report()  # a quarter of them twice
    assert report["rows"] == 25_000 and report["sampled_share"] < 0.1
    assert report["distinct"] == pytest.approx(20_000, rel=0.15)
    assert report["extra"] == pytest.approx(5_000, rel=0.3) == report["repeated"]
