"""The trade-off of guidance: results of `ppldm evaluate`, a point per guidance scale."""

from dataclasses import dataclass
from pathlib import Path

from ...utils.errors import DataError
from ...utils.text import escape
from ..result import Result, read_result

# What may stand on the vertical axis: the first of which all results have a value; `name:features` counts too.
DISTANCES = ("fid", "clip_fid", "cmmd", "kid", "frechet")
SCALE, SCORE = "guidance_scale", "clip_score"


@dataclass(frozen=True)
class Curve:
    """One model's points. x and y: names of metrics; x may be `guidance_scale`. points: (scale, x, y), each of the last
    two as value, low, high."""

    name: str
    x: str
    y: str
    points: list[tuple[float, tuple[float, float, float], tuple[float, float, float]]]


def read_sweep(paths: list[Path]) -> list[Curve]:
    """A curve for each model among the results, which are files or in folders. Raises DataError."""
    files = [one for path in paths for one in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if paths and not files:
        raise DataError(f"{paths[0]} holds no results; name what `ppldm evaluate` wrote")
    found: dict[str, list[tuple[float, Result]]] = {}
    for file in files:
        result = read_result(file)
        scale = result.settings.get("drawn", {}).get(SCALE)
        if scale is None:
            raise DataError(f"{file} has no guidance scale: its pictures were not drawn; omit it from --sweep")
        found.setdefault(str(result.of["name"]), []).append((float(scale), result))
    shared = set.intersection(*(set(one.metrics) for own in found.values() for _, one in own)) if found else set()
    names = [name for known in DISTANCES for name in sorted(shared) if name.partition(":")[0] == known]
    if found and not names:
        raise DataError(
            f"the results of --sweep share none of {', '.join(DISTANCES)}; evaluate with the same --metrics"
        )
    x = next((name for name in sorted(shared) if name.partition(":")[0] == SCORE), SCALE)
    return [Curve(escape(name), x, names[0], _points(own, x, names[0])) for name, own in found.items()]


def _points(results: list[tuple[float, Result]], x: str, y: str) -> list:
    def ends(result: Result, scale: float, name: str):
        measured = result.metrics.get(name)
        return tuple(measured[what] for what in ("value", "low", "high")) if measured else (scale,) * 3

    ordered = sorted(results, key=lambda pair: pair[0])
    return [(scale, ends(result, scale, x), ends(result, scale, y)) for scale, result in ordered]
