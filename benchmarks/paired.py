"""What runs that share weights, rows and noises tell of two recipes: all is a difference of one seed.

A curve is [(samples, loss), …] of one run. The interval is Student's over seeds, with the error of 5 % shared out to
all looks at it and all variants (Bonferroni), so that seeds may be added until it leaves out 0.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

LOOKS = (4, 6, 8)  # numbers of seeds after which a variant is judged
ERROR = 0.05


def interval(values: Sequence[float], error: float = ERROR) -> tuple[float, float, float]:
    """(mean, low, high) of the mean of values; infinite of one value."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, -math.inf, math.inf
    reach = stats.t.ppf(1 - error / 2, count - 1) * float(np.std(values, ddof=1)) / count**0.5
    return mean, mean - reach, mean + reach


def look(seeds: int) -> int:
    """How many of so many seeds the last look takes; all where there was none."""
    return max((one for one in LOOKS if one <= seeds), default=seeds)


def judge(differences: Sequence[float], variants: int) -> dict:
    """{"value", "low", "high", "told_apart"} of the differences of seeds in their order, at the last look that they
    allow, corrected for all looks and `variants`."""
    count = look(len(differences))
    mean, low, high = interval(differences[:count], ERROR / (len(LOOKS) * variants))
    return {"value": mean, "low": low, "high": high, "seeds": count, "told_apart": bool(low > 0 or high < 0)}


def needs_more(differences: Sequence[float], variants: int) -> bool:
    """Whether another look may tell what the ones before did not."""
    few = len(differences) < LOOKS[0]
    return few or (len(differences) < LOOKS[-1] and not judge(differences, variants)["told_apart"])


def samples_until(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """The samples after which a run's loss is `loss` for the first time, between two points of its curve by the
    logarithm of the loss; None where it is never."""
    before = None
    for samples, found in curve:
        if found <= loss:
            if before is None or found == before[1]:
                return float(samples)
            share = math.log(before[1] / loss) / math.log(before[1] / found)
            return before[0] + share * (samples - before[0])
        before = samples, found
    return None


def samples_ratio(variant: Sequence[tuple[int, float]], plain: Sequence[tuple[int, float]]) -> float:
    """The samples that a variant needs for the plain run's last loss, by those of the plain run; where it never comes
    there, the other way about: how many times as many samples it took as the plain run does to its last loss."""
    total, loss = plain[-1]
    if (needed := samples_until(variant, loss)) is not None:
        return needed / total
    needed = samples_until(plain, variant[-1][1])
    return variant[-1][0] / needed if needed else math.inf


def false_alarms(finals: Sequence[float], comparisons: int, seed: int = 0) -> int:
    """Of so many comparisons of a recipe with itself, how many are told apart: differences of the logarithm of the last
    losses of runs that share nothing, paired at random."""
    rng, found = np.random.default_rng(seed), 0
    for _ in range(comparisons):
        logs = np.log(rng.permutation(finals))
        half = len(logs) // 2
        differences = (logs[:half] - logs[half : 2 * half]).tolist()
        looks = [differences[:look] for look in LOOKS if look <= half]
        found += any(judge(own, 1)["told_apart"] for own in looks)
    return found


def unpaired_and_paired(first: Sequence[float], second: Sequence[float]) -> dict:
    """Of the same seeds' figures of two variants, half the width of the 95 % interval of the difference of their means
    (Welch's), and of the mean of their differences; and how the figures correlate."""
    first, second = np.asarray(first), np.asarray(second)
    count = len(first)
    by_seed = interval(second - first)
    variances = first.var(ddof=1) / count, second.var(ddof=1) / count
    freedom = sum(variances) ** 2 / sum(one**2 / (count - 1) for one in variances)
    apart = stats.t.ppf(0.975, freedom) * sum(variances) ** 0.5
    correlation = float(np.corrcoef(first, second)[0, 1])
    return {"difference": by_seed[0], "unpaired": float(apart), "paired": by_seed[2] - by_seed[0],
            "correlation": correlation, "seeds": count}  # fmt: skip
