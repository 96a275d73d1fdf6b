"""Which rows are kept, and which of them stands for which."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.inspect.duplicates.stars import choose_stars, count_chains, make_nodes, parse_keep, rank_rows
from ppldm.utils.errors import ConfigError

PAIRS = st.dictionaries(
    st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(lambda pair: pair[0] < pair[1]),
    st.integers(0, 8),
    max_size=30,
)


def arrays(pairs: dict) -> tuple[np.ndarray, ...]:
    better, worse = (np.array([pair[side] for pair in pairs], np.int32) for side in (0, 1))
    return better, worse, np.array([*pairs.values()], np.int8)


@given(PAIRS)
@settings(deadline=None)
def test_stars_are_those_of_going_through_the_nodes_one_by_one(pairs):
    star, distance = choose_stars(12, *arrays(pairs))
    kept = []
    for node in range(12):
        near = sorted((pairs[one, node], one) for one in kept if (one, node) in pairs)
        if not near:
            kept.append(node)
        assert (distance[node], star[node]) == (near[0] if near else (0, node))


def test_chains_are_counted():
    chain = {(0, 2): 1, (1, 2): 1}  # 0 near 2 near 1, and 0 far from 1
    better, worse, bits = arrays(chain)
    star, _ = choose_stars(6, better, worse, bits)
    assert star.tolist() == [0, 1, 0, 3, 4, 5]
    assert count_chains(star, better, worse) == 1
    better, worse, bits = arrays({(0, 1): 1, (0, 2): 1})
    assert count_chains(choose_stars(6, better, worse, bits)[0], better, worse) == 0


def test_the_best_is_by_rules_in_turn():
    pixels, chars = np.array([4, 9, 9, 4]), np.array([7, 1, 2, 7])
    assert rank_rows(parse_keep("largest,longest_caption,first"), pixels, chars).tolist() == [2, 1, 0, 3]
    assert rank_rows(parse_keep("longest_caption"), pixels, chars).tolist() == [0, 3, 2, 1]
    assert rank_rows(parse_keep("first"), pixels, chars).tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="'best'"):
        parse_keep("largest,best")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=12))
def test_rows_of_a_file_are_one_node(rows):
    usable, digests = (np.array(column) for column in zip(*rows, strict=True))
    ranked = np.random.default_rng(0).permutation(len(rows))
    nodes = make_nodes(ranked, usable, digests)
    expected = list(dict.fromkeys(digests[row] for row in ranked if usable[row]))  # by rank
    assert (nodes.of_rows[~usable] == -1).all() and digests[nodes.rows].tolist() == expected
    assert all(expected[nodes.of_rows[row]] == digests[row] for row in np.flatnonzero(usable))
