"""What an evaluation has found, with all that it depends on: one JSON file.

    format      1
    of          what was evaluated: its name, weights, and the digest of its pictures
    settings    what two results must share to be compared, in groups: `real`, `generated`, `drawn` (how they were
                drawn), `features.<network>`, `metrics.<name>` (estimator), `versions`
    metrics     by name: value, low and high (95 % interval), details, higher_is_better
    left_out    metrics that are on by default and could not be computed, with the reason
    remarks     what else is to be known, as the licence of a set of prompts
    terms       digest of what each picture adds to each value, where it is known what each picture was to show

It holds no times, so that the same command gives the same bytes. The terms are in a file beside it, NAME.terms.npz, of
float32: `ppldm compare` needs them to compare pictures of the same prompts one by one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from .. import __version__
from ..utils.checksums import sha256_arrays
from ..utils.errors import DataError
from ..utils.files import atomic_write, read_json_object, write_json
from ..utils.machine.devices import KINDS
from .metrics.base import Metric
from .metrics.bootstrap import Measured
from .pictures import WEIGHTS, PictureSet

FORMAT = 1
_LIBRARIES = ("numpy", "scipy", "pillow", *(kind.package for kind in KINDS.values()))
_OWN_OF_EACH = ("prompt", "index", WEIGHTS)  # settings of a picture, not of the evaluation


@dataclass
class Result:
    """The fields of the file, and `own_terms`: by metric, those of each set of pictures, float32 [N]."""

    of: dict
    settings: dict[str, dict]
    metrics: dict[str, dict] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    remarks: dict = field(default_factory=dict)
    terms: str | None = None
    format: int = FORMAT
    own_terms: dict[str, list[np.ndarray]] = field(default_factory=dict, repr=False, compare=False)

    def add(self, name: str, metric: Metric, measured: Measured) -> None:
        """A metric's value under the name it was asked for. Raises DataError where it is not a number."""
        for what in ("value", "low", "high"):
            if not math.isfinite(getattr(measured, what)):
                raise DataError(f"{name}: the {what} is {getattr(measured, what)}; look at the pictures and features")
        known = ("value", "low", "high", "details")
        self.metrics[name] = {key: getattr(measured, key) for key in known}
        self.metrics[name]["higher_is_better"] = metric.higher_is_better
        self.own_terms[name] = [np.asarray(own, np.float32) for own in measured.terms]

    def write(self, path: Path, keep_terms: bool = False) -> None:
        """As JSON, atomically. keep_terms: in their file too."""
        if keep_terms:
            terms = self.own_terms.items()
            arrays = {f"{name}/{number}": own for name, some in terms for number, own in enumerate(some)}
            self.terms = sha256_arrays(arrays.items())
            with atomic_write(terms_path(path)) as file:
                np.savez(file, **arrays)
        write_json(path, self.as_json())

    def as_json(self) -> dict:
        """What the file holds."""
        return {name: value for name, value in vars(self).items() if name != "own_terms"}


def read_result(path) -> Result:
    """The result in a file. Raises DataError."""
    read = read_json_object(path, DataError, "name a result that `ppldm evaluate` wrote")
    if read.get("format") != FORMAT or not all(isinstance(read.get(name), dict) for name in ("settings", "metrics")):
        raise DataError(f"{path} is not a result of `ppldm evaluate` (of format {FORMAT}); name another file")
    result = Result(**{name: read[name] for name in Result.__dataclass_fields__ if name in read})
    result.own_terms = _read_terms(Path(path), result.terms)
    return result


def terms_path(path: Path) -> Path:
    """The file of the terms of a result."""
    return path.with_name(f"{path.stem}.terms.npz")


def _read_terms(path: Path, digest: str | None) -> dict[str, list[np.ndarray]]:
    """By metric; {} where the file is not there, or is another result's."""
    try:
        with np.load(terms_path(path)) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, BadZipFile):
        return {}
    if sha256_arrays(arrays.items()) != digest:
        return {}
    found = {}
    for key in sorted(arrays, key=lambda key: (key.rpartition("/")[0], int(key.rpartition("/")[2]))):
        found.setdefault(key.rpartition("/")[0], []).append(arrays[key])
    return found


def begin_result(name: str, generated: PictureSet, real: PictureSet, weights: Mapping | None) -> Result:
    """A result without metrics. weights: what is known of them besides what the pictures say."""
    of = {
        "name": name,
        "weights": {"fingerprint": generated.drawn.get(WEIGHTS), **(weights or {})},
        "pictures": generated.digest,
    }
    settings = {
        "real": {"digest": real.digest, **real.facts},
        "generated": {"requests": generated.requests, **generated.facts},
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
