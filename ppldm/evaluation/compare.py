"""Which of two evaluations is better, where they can be compared at all.

Two results may differ in what was evaluated, weights and the pictures that follow from them. All else must be equal:
FID changes by more with the number of pictures, the filter of a resize or the guidance than with most improvements of a
model. Two values whose intervals overlap are no difference: a careful rule, at the level of about 99 %, not 95 %.

Results whose pictures were made for the same prompts, from the same seeds, are compared picture by picture instead, by
the terms that results keep beside them: no difference is where the interval of the difference holds 0. What an easy
prompt, or an odd real picture, does to both is no part of that interval, so that it sees more.
"""

import numpy as np

from ..utils.errors import ConfigError
from ..utils.text import did_you_mean

NO_DIFFERENCE = "no difference"


def compare_results(a, b, allow: tuple[str, ...] = ()) -> dict:
    """{"accepted": settings that differ, "metrics": {name: `judge`}, "only": {"a": names, "b": names}} of two `Result`.
    Raises ConfigError naming each setting that differs and is not in `allow`, and for an unknown name there."""
    common = [name for name in a.metrics if name in b.metrics]
    if not common:
        raise ConfigError("the two results have no metric in common; evaluate both with the same --metrics")
    differing = find_differences(a.settings, b.settings)
    known = sorted({f"{group}.{name}" for one in (a, b) for group, own in one.settings.items() for name in own})
    for name in allow:
        if not any(_is_allowed(one, (name,)) for one in known):
            raise ConfigError(f"--allow {name} is not a setting of these results; {did_you_mean(name, known)}")
    refused = {name: words for name, words in differing.items() if not _is_allowed(name, allow)}
    if refused:
        raise ConfigError(
            f"these cannot be compared: {'; '.join(refused.values())}. Evaluate again with equal settings, or accept "
            f"it by --allow {' '.join(refused)}"
        )
    return {
        "accepted": list(differing.values()),
        "metrics": {name: judge(a.metrics[name], b.metrics[name], pair_terms(a, b, name)) for name in common},
        "only": {
            "a": [name for name in a.metrics if name not in b.metrics],
            "b": [name for name in b.metrics if name not in a.metrics],
        },
    }


def find_differences(a: dict[str, dict], b: dict[str, dict]) -> dict[str, str]:
    """Setting -> what differs, in words. Networks and estimators that only one of the two used make no difference."""
    found = {}
    for group in dict.fromkeys([*a, *b]):
        if group.startswith(("features.", "metrics.")) and not (group in a and group in b):
            continue
        own, other = a.get(group, {}), b.get(group, {})
        for name in dict.fromkeys([*own, *other]):
            if own.get(name) != other.get(name):
                found[f"{group}.{name}"] = f"{group}.{name} is {_show(own.get(name))} and {_show(other.get(name))}"
    return found


def pair_terms(a, b, name: str) -> list[np.ndarray] | None:
    """What each picture adds to a metric of b more than to that of a, for each set of pictures; None where the pictures
    of two `Result` do not go together, or their terms are not kept."""
    same = (("generated", "requests"), ("real", "digest"))
    if any(a.settings[group].get(key) != b.settings[group].get(key) for group, key in same):
        return None
    own, others = (one.own_terms.get(name, ()) for one in (a, b))
    if not own or [len(one) for one in own] != [len(one) for one in others]:
        return None
    return [np.subtract(more, less, dtype=np.float64) for less, more in zip(own, others, strict=True)]


def judge(a: dict, b: dict, paired: list[np.ndarray] | None = None) -> dict:
    """A metric of both, with the verdict: "no difference", "a is better", or of a metric without a good side "a is
    higher". paired: `pair_terms`, by which there is `difference`, b less a with its interval, and which decides."""
    from .metrics.bootstrap import measure_difference

    found = {}
    if paired:
        gap = measure_difference(b["value"] - a["value"], *paired, seed=0)
        found["difference"] = {"value": gap.value, "low": gap.low, "high": gap.high}
        is_none = gap.low <= 0 <= gap.high
    else:
        is_none = a["low"] <= b["high"] and b["low"] <= a["high"]
    if is_none:
        verdict = NO_DIFFERENCE
    else:
        higher = "a" if a["value"] > b["value"] else "b"
        other = "b" if higher == "a" else "a"
        sign = a["higher_is_better"]
        verdict = f"{higher} is higher" if sign is None else f"{higher if sign else other} is better"
    keep = ("value", "low", "high")
    both = {"a": {key: a[key] for key in keep}, "b": {key: b[key] for key in keep}}
    return {**both, **found, "verdict": verdict, "rule": "paired" if paired else "intervals"}


def describe(report: dict) -> str:
    lines = [f"a: {report['a']}", f"b: {report['b']}", *(f"accepted: {words}" for words in report["accepted"])]
    width = max(len(name) for name in report["metrics"]) + 2
    for name, found in report["metrics"].items():
        shown = f"{show_measured(found['a']):<32}{show_measured(found['b']):<32}"
        gap = f" (picture by picture: b - a is {show_measured(found['difference'])})" if "difference" in found else ""
        lines.append(f"{name:<{width}}{shown}{found['verdict']}{gap}")
    for side, names in report["only"].items():
        lines += [f"only in {side}: {', '.join(names)}"] if names else []
    return "\n".join(lines)


def show_measured(found: dict) -> str:
    return f"{found['value']:.4g} ({found['low']:.4g} to {found['high']:.4g})"


def _is_allowed(name: str, allow: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allow)


def _show(value) -> str:
    """Digests by their beginning."""
    text = "not known" if value is None else str(value)
    return f"{text[:12]}…" if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else text
