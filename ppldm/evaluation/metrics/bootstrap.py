"""A value with its 95 % interval: a bootstrap of what each picture contributes.

Pictures drawn again with replacement contain twins, which no generator draws: they shift a Fréchet distance upwards and
break every nearest neighbour. So what is resampled are the first-order terms of the statistic (its von Mises
expansion): t(x) for every generated picture and u(y) for every real one, such that

    statistic - E[statistic]  =  mean t(x) - E t  +  mean u(y) - E u  +  terms of higher order.

They are the influence function, or else the pseudo-values of the jackknife (Efron and Tibshirani, An Introduction to
the Bootstrap, 1993, chapters 11 and 22), and cost about as much as the value. The interval is BCa (chapter 14; for a
sum of means the bias term is 0) and covers the expectation of the statistic at these numbers of pictures, which for a
biased one such as the Fréchet distance is not the value at infinitely many. Where the linear terms vanish (two sets
from one distribution) it is too wide rather than too narrow.

Two results on the same real pictures, and on pictures of the same prompts and seeds, have terms that go together: the
difference of the statistics has the differences of the terms, and what both share is gone from its interval.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtr, ndtri

from ...utils.rng import Stream, make_rng

TRIALS = 1000
LEVEL = 0.95
_AT_ONCE = 1 << 20  # numbers drawn


@dataclass(frozen=True)
class Measured:
    """A metric's value and its 95 % interval; `details` are JSON-ready. terms: see `measure`."""

    value: float
    low: float
    high: float
    details: dict = field(default_factory=dict)
    terms: tuple[np.ndarray, ...] = field(default=(), repr=False, compare=False)


def measure(
    value: float, *terms: np.ndarray, seed: int, details: dict | None = None, bounds=(-np.inf, np.inf)
) -> Measured:
    """The value with its interval. terms: for each set that was drawn independently [n] float, one term for each of
    its members, up to a constant. bounds: what the statistic cannot leave."""
    deviations, variance, third = np.zeros(TRIALS), 0.0, 0.0
    for number, own in enumerate(terms):
        count = len(own)
        # A mean of n resampled values varies less than a mean of n new ones, by (n - 1) / n.
        centred = (np.asarray(own, dtype=np.float64) - np.mean(own)) * np.sqrt(count / max(1, count - 1))
        rng = make_rng(seed, Stream.EVALUATION, 0, number)
        step = max(1, _AT_ONCE // count)
        for start in range(0, TRIALS, step):
            some = deviations[start : start + step]
            some += centred[rng.integers(count, size=(len(some), count))].mean(axis=1)
        variance += np.mean(centred**2) / count
        third += np.mean(centred**3) / count**2
    normal = ndtri(np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    skew = third / (6 * variance**1.5) if variance > 0 else 0.0
    low, high = value + np.quantile(deviations, ndtr(normal / (1 - skew * normal)))
    low, high = (float(np.clip(end, *bounds)) for end in (min(low, value), max(high, value)))
    return Measured(float(value), low, high, details or {}, terms)


def measure_difference(value: float, *differences: np.ndarray, seed: int) -> Measured:
    """The difference of two values whose pictures go together, with its interval. differences: of their terms. Of two
    shares, each 1, 0 or -1, it is that of Agresti and Min (2005, doi:10.1002/sim.1781): half a pair more of each of
    four kinds, since a bootstrap of a few unlike pairs is too sure of them."""
    if len(differences) > 1 or not np.isin(differences[0], (-1, 0, 1)).all():
        return measure(value, *differences, seed=seed)
    total, unlike, more = len(differences[0]) + 2, np.abs(differences[0]).sum() + 1, differences[0].sum()
    reach = ndtri((1 + LEVEL) / 2) * np.sqrt(unlike - more**2 / total) / total
    middle = more / total
    return Measured(float(value), float(min(value, middle - reach)), float(max(value, middle + reach)))
