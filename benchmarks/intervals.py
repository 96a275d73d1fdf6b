"""How often the intervals of metrics cover the truth:  python benchmarks/intervals.py [--trials 1000] [--json]

Each trial draws both sets anew from known distributions and computes the metric with its interval; the truth is the
mean value of all trials, which is the expectation at that number of pictures. Printed for each metric: the share of
intervals that hold it, marked where that is not what 95 of 100 benchmarks would show of a right interval; on which side
it lay of the others; and how wide the intervals are by the spread of the values. Gaussians 0.7 apart in four axes,
whose features are given to each metric as they are; pictures of one colour with noise.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from results import add_result_flags, save_results
from scipy.stats import binom

from ppldm.evaluation.metrics import distributions as sliced
from ppldm.evaluation.metrics.base import METRICS

AXES, SHIFT, SIDE = 4, 0.7, 16
SAME_FORMULA = ("fid", "clip_fid")  # as frechet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--pictures", type=int, nargs="*", default=[150, 600], help="of each set; a sixth if decoded")
    parser.add_argument("--metrics", nargs="*", default=[name for name in METRICS if name not in SAME_FORMULA])
    add_result_flags(parser, "intervals")
    arguments = parser.parse_args()
    sliced.DIRECTIONS, sliced.PATCHES = 16, 16  # which change the cost, and not whether the interval is right
    low, high = (binom.ppf(end, arguments.trials, 0.95) / arguments.trials for end in (0.025, 0.975))
    print(f"a right interval covers {low:.3f} to {high:.3f} of {arguments.trials} trials")
    results = []
    for name in arguments.metrics:
        for count in arguments.pictures:
            results.append({"metric": name, "pictures": count, **measure(name, count, arguments.trials)})
            found = results[-1]
            mark = "" if low <= found["covered"] <= high else "  *"
            shares = ", ".join(f"{found[key]:.3f} {key}" for key in ("covered", "below", "above"))
            print(f"{name:<20}{count:>5}  {shares}, {found['relative_width']:.2f} of the right width{mark}", flush=True)
    save_results(arguments, {"trials": arguments.trials, "expected": [low, high], "metrics": results})


def measure(name: str, count: int, trials: int) -> dict:
    """Shares of trials, and the mean width by that of 1.96 standard deviations either way."""
    found = [METRICS[name].compute(*draw(name, seed, count), seed=0) for seed in range(trials)]
    values, lows, highs = np.array([(one.value, one.low, one.high) for one in found]).T
    truth = values.mean()
    below, above = np.mean(truth < lows), np.mean(truth > highs)
    width = np.mean(highs - lows) / (2 * 1.96 * values.std())
    return {"covered": 1 - below - above, "below": below, "above": above, "relative_width": width, "truth": truth}


def draw(name: str, seed: int, count: int) -> list[np.ndarray]:
    """One trial's inputs."""
    rng, kind = np.random.default_rng(seed), METRICS[name].inputs
    if kind in ("pictures", "pairs"):
        made = [draw_pictures(rng, count // 6) for _ in range(2 if kind == "pictures" else 1)]
        return [np.clip(base + noise * factor, 0, 255).astype(np.uint8)
                for (base, noise), factor in zip((made[0], made[-1]), (1, 0.2), strict=True)]  # fmt: skip
    generated, real = rng.normal(size=(count, AXES)) + SHIFT, rng.normal(size=(count, AXES))
    if name == "nearest_training":  # whose training rows are given
        real = np.random.default_rng(10**6).normal(size=(count, AXES))
    return [generated] if kind == "single" else [generated, real]


def draw_pictures(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(colours, noise), of a strength of its own for each picture."""
    strengths = rng.uniform(10, 30, size=(count, 1, 1, 1))
    return rng.normal(128, 25, size=(count, 1, 1, 3)), rng.normal(size=(count, SIDE, SIDE, 3)) * strengths


if __name__ == "__main__":
    main()
