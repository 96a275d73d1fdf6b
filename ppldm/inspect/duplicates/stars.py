"""Which pictures of many are copies of which, given how near they are: stars around the best ones.

Rows of the same file are one node; nodes are numbered by rank, the best first. From the best node on, each is kept
unless it is near to a better one that is kept. So no two kept nodes are near each other, and every other one is near to
the one that stands for it. (Components would also join a chain: a near b near c, with a far from c, of which one
picture would then stand for things that are not like it. How many such chains there are is counted.)
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ...utils.errors import ConfigError

KEEP_RULES = ("largest", "longest_caption", "first")


@dataclass(frozen=True)
class Nodes:
    """`of_rows`: int32 [rows], each row's node, -1 for one that cannot be used. `rows`: int64 [nodes], the best row of
    each."""

    of_rows: np.ndarray
    rows: np.ndarray


def parse_keep(text: str) -> list[str]:
    """The rules of --keep, the first first. Raises ConfigError."""
    rules = text.split(",")
    if unknown := [rule for rule in rules if rule not in KEEP_RULES]:
        raise ConfigError(f"--keep: {unknown[0]!r} is not a rule; write some of {','.join(KEEP_RULES)}")
    return rules


def rank_rows(rules: list[str], pixels: np.ndarray, caption_chars: np.ndarray) -> np.ndarray:
    """int64 [rows]: the rows from the best to the worst; by their order where the rules say nothing else."""
    by_rule = {"largest": -pixels, "longest_caption": -caption_chars, "first": np.arange(len(pixels))}
    return np.lexsort([by_rule[rule] for rule in reversed([*rules, "first"])])


def make_nodes(ranked: np.ndarray, usable: np.ndarray, digests: np.ndarray) -> Nodes:
    """Nodes of rows. ranked: the rows by rank. usable: bool [rows]. digests: [rows], of their files."""
    rows = ranked[usable[ranked]]
    _, first, group = np.unique(digests[rows], return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(first), np.int32)
    number[order] = np.arange(len(first), dtype=np.int32)
    of_rows = np.full(len(ranked), -1, np.int32)
    of_rows[rows] = number[group]
    return Nodes(of_rows, rows[first[order]])


def choose_stars(
    num_nodes: int, better: np.ndarray, worse: np.ndarray, bits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [nodes], the kept node that stands for each, itself where it is kept; int8 [nodes], its bits from that).

    better, worse, bits: near pairs of nodes, `better` having the lower number, each once.
    """
    undecided, kept = np.ones(num_nodes, bool), np.zeros(num_nodes, bool)
    left_better, left_worse = better, worse
    while undecided.any():
        waiting = np.zeros(num_nodes, bool)
        waiting[left_worse] = True
        now = undecided & ~waiting
        kept |= now
        undecided[now] = False
        undecided[left_worse[now[left_better]]] = False
        left = undecided[left_better] & undecided[left_worse]
        left_better, left_worse = left_better[left], left_worse[left]
    star, distance = np.arange(num_nodes, dtype=np.int32), np.zeros(num_nodes, np.int8)
    of_kept = kept[better]
    better, worse, bits = better[of_kept], worse[of_kept], bits[of_kept]
    order = np.lexsort((better, bits, worse))
    found, first = np.unique(worse[order], return_index=True)
    star[found], distance[found] = better[order][first], bits[order][first]
    return star, distance


def count_chains(star: np.ndarray, better: np.ndarray, worse: np.ndarray) -> int:
    """Components of near nodes that more than one star was made of."""
    size = len(star)
    count, component = connected_components(coo_array((np.ones(len(better), bool), (better, worse)), (size, size)))
    kept = star == np.arange(size)
    return int((np.bincount(component[kept], minlength=count) > 1).sum())
