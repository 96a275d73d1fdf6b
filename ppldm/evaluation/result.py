"""What an evaluation has found, with all that it depends on: one JSON file.

    format      1
    of          what was evaluated: its name, weights, and the digest of its pictures
    settings    what two results must share to be compared, in groups: `real`, `generated`, `drawn` (how they were
                drawn), `features.<network>`, `metrics.<name>` (estimator), `versions`
    metrics     by name: value, low and high (95 % interval), details, higher_is_better
    left_out    metrics that are on by default and could not be computed, with the reason
    remarks     what else is to be known, as the licence of a set of prompts

It holds no times, so that the same command gives the same bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..utils.errors import DataError
from ..utils.files import read_json_object, write_json
from .metrics.base import Measured, Metric
from .pictures import WEIGHTS, PictureSet

FORMAT = 1
_LIBRARIES = ("numpy", "scipy", "pillow", "paddlepaddle", "paddlepaddle-gpu")
_OWN_OF_EACH = ("prompt", "index", WEIGHTS)  # what of a picture's settings is no setting of the evaluation


@dataclass
class Result:
    """The fields of the file."""

    of: dict
    settings: dict[str, dict]
    metrics: dict[str, dict] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    remarks: dict = field(default_factory=dict)
    format: int = FORMAT

    def add(self, name: str, metric: Metric, measured: Measured) -> None:
        """A metric's value under the name it was asked for. Raises DataError where it is no number."""
        for what in ("value", "low", "high"):
            if not math.isfinite(getattr(measured, what)):
                raise DataError(f"{name}: the {what} is {getattr(measured, what)}; look at the pictures and features")
        self.metrics[name] = {**asdict(measured), "higher_is_better": metric.higher_is_better}

    def write(self, path: Path) -> None:
        """As JSON, atomically."""
        write_json(path, asdict(self))


def read_result(path) -> Result:
    """The result in a file. Raises DataError."""
    read = read_json_object(path, DataError, "name a result that `ppldm evaluate` wrote")
    if read.get("format") != FORMAT or not all(isinstance(read.get(name), dict) for name in ("settings", "metrics")):
        raise DataError(f"{path} is not a result of `ppldm evaluate` (of format {FORMAT}); name another file")
    return Result(**{name: read[name] for name in Result.__dataclass_fields__ if name in read})


def describe_set(pictures: PictureSet) -> dict:
    """What a value depends on besides the pictures themselves."""
    return {name: value for name, value in pictures.facts.items() if name != "formats"} | {
        "formats": ", ".join(pictures.facts["formats"])
    }


def begin_result(name: str, generated: PictureSet, real: PictureSet, weights: Mapping | None) -> Result:
    """A result without metrics. weights: what is known of them besides what the pictures say."""
    of = {
        "name": name,
        "weights": {"fingerprint": generated.drawn.get(WEIGHTS), **(weights or {})},
        "pictures": generated.digest,
    }
    settings = {
        "real": {"digest": real.digest, **describe_set(real)},
        "generated": {"requests": generated.requests, **describe_set(generated)},
        "drawn": {name: value for name, value in generated.drawn.items() if name not in _OWN_OF_EACH},
        "versions": versions(),
    }
    return Result(of, settings)


def versions() -> dict[str, str]:
    """Of what computes the values."""
    found = {"ppldm": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
