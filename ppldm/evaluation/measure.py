"""From two sets of pictures to a result: which metrics, by which networks, each computed once; and its file.

A metric is asked for by its name, or with the network whose features it is to use: `fid`, `frechet:dinov2`. By default
all are computed that need no network, and those of the networks that are given. A result is one JSON file:

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from .. import __version__
from ..demo.shapes_world.grammar import parse_caption
from ..utils.checksums import digest_of, sha256_arrays
from ..utils.errors import ConfigError, DataError
from ..utils.files import atomic_write, make_output_dir, read_json_object, write_json
from ..utils.log import get_logger
from ..utils.machine.devices import KINDS
from ..utils.machine.resources import versions_of
from ..utils.text import did_you_mean
from .composition import grade_pictures
from .features.base import NETWORKS, FeatureNetwork, load_features
from .metrics.base import METRICS, Metric
from .metrics.bootstrap import Measured
from .metrics.distributions import frechet_distance
from .pictures import WEIGHTS, PictureSet, Statistics

COMPOSITION = "composition"
# `composition` takes pictures and their captions, and has several values (`composition.py`).
_GRADES = Metric(COMPOSITION, COMPOSITION, None, True, grade_pictures, {"interval": "Wilson, 95%"}, 1)
KNOWN = METRICS | {COMPOSITION: _GRADES}
SEED = 0  # of what metrics draw: subsets, projections, bootstrap
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
    found: dict[str, list[np.ndarray]] = {}
    for key, array in arrays.items():  # in the order of their numbers, as they were written
        found.setdefault(key.rpartition("/")[0], []).append(array)
    return found


def begin_result(name: str, generated: PictureSet, real: PictureSet | Statistics, weights: Mapping | None) -> Result:
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
        "versions": {"ppldm": __version__, **versions_of(_LIBRARIES)},  # of what computes the values
    }
    return Result(of, settings)


def choose_metrics(
    words: Sequence[str], given: Mapping[str, str | None], paired: bool = False
) -> tuple[list[Metric], dict[str, str]]:
    """(metrics to compute, those left out with the reason). given: paths of networks by name. paired: each picture is
    made from a real one, so that those for pairs are on by default as well. Raises ConfigError for unknown names, and
    networks that are not given."""
    if not words:
        found = [metric for metric in KNOWN.values() if paired or metric.inputs != "pairs"]
        missing = {one.name: _missing(one.features, given) for one in found}
        return [one for one in found if not missing[one.name]], {name: why for name, why in missing.items() if why}
    found = [_parse(word) for word in dict.fromkeys(words)]
    for one in found:
        if why := _missing(one.features, given):
            raise ConfigError(f"--metrics {one.name} {why}, {NETWORKS[one.features].given_by}")
    return found, {}


def _parse(word: str) -> Metric:
    name, colon, network = word.partition(":")
    if name not in KNOWN:
        raise ConfigError(f"no metric {name!r}; {did_you_mean(name, KNOWN)}")
    metric = KNOWN[name]
    if not colon:
        return replace(metric, asked=True)
    if metric.features is None:
        raise ConfigError(f"--metrics {word}: {name} uses no features; write {name}")
    if network not in NETWORKS:
        raise ConfigError(f"--metrics {word}: no network {network!r}; {did_you_mean(network, NETWORKS)}")
    if NETWORKS[network].of_pairs != (metric.inputs == "pairs"):
        raise ConfigError(f"--metrics {word}: {name} takes no features of {network}; write {name}")
    return replace(metric, name=word, features=network, asked=True)


def _missing(network: str | None, given: Mapping[str, str | None]) -> str:
    """Why a network is not at hand; "" where it is."""
    if network is None or NETWORKS[network].flag is None or given.get(network):
        return ""
    return f"needs {NETWORKS[network].flag}"


@dataclass(frozen=True)
class Networks:
    """Feature networks by name, loaded when they are first asked for. paths: or published names, fetched unless
    `offline`. convention: of inception. cache: folder in which features are kept by all that they depend on."""

    paths: Mapping[str, str | None]
    convention: str | None
    device: str | None
    offline: bool
    cache: Path
    loaded: dict[str, FeatureNetwork] = field(default_factory=dict)

    def __getitem__(self, name: str) -> FeatureNetwork:
        """Raises ConfigError, ModelError."""
        if name not in self.loaded:
            convention = self.convention if name == "inception" else None
            self.loaded[name] = load_features(name, self.paths.get(name), convention, self.device, self.offline)
        return self.loaded[name]

    def settings(self, name: str) -> dict:
        return {"digest": self[name].digest, "convention": self[name].convention}

    def embed(self, name: str, pictures: PictureSet | Statistics, keep: bool = False):
        """Features [N, dim] float32; of statistics their moments. keep: in the cache. Raises DataError where they are
        not finite."""
        if isinstance(pictures, Statistics):
            return pictures.moments
        path = self.cache / f"{name}-{digest_of([self.settings(name), pictures.digest])}.npy"
        if keep and path.is_file():
            return np.load(path)
        get_logger().info("%s features of %d pictures of %s", name, len(pictures), pictures.where)
        features = self[name](pictures)
        if (bad := np.flatnonzero(~np.isfinite(features).all(axis=1))).size:
            raise DataError(
                f"the {name} features of {bad.size} of {len(features)} pictures of {pictures.where} are not finite, "
                f"{pictures.ids[bad[0]]} for one; look at the picture and at the network's weights"
            )
        if keep:
            make_output_dir(self.cache)
            with atomic_write(path) as file:
                np.save(file, features)
        return features


def check(metric: Metric, generated: PictureSet, real: PictureSet | Statistics) -> str:
    """Why a metric cannot be computed of these sets; "" where it can."""
    of_both = metric.inputs in ("features", "pictures", "pairs")
    sets = [("generated", generated, "--num-samples"), ("real", real, "--num-real")]
    if isinstance(real, Statistics):
        if of_both and (metric.compute, metric.features) != (frechet_distance, "inception"):
            return f"needs real pictures, and {real.where} has statistics for fid; give a filelist or a folder"
        sets.pop()
    for what, pictures, flag in sets:
        if (of_both or what == "generated") and len(pictures) < metric.least:
            return f"needs {metric.least} {what} pictures, and there are {len(pictures)}; raise {flag}"
    sizes = generated.facts["size"], real.facts["size"]
    if metric.inputs in ("pictures", "pairs") and (sizes[0] != sizes[1] or "mixed" in sizes):
        return f"needs pictures of one size, and they are {sizes[0]} and {sizes[1]}; give --resolution"
    if metric.inputs == "pairs" and len(generated) != len(real):
        return f"compares pictures pair by pair, and there are {len(generated)} and {len(real)}"
    if metric.inputs in ("texts", COMPOSITION) and not all(generated.captions):
        missing = sum(not caption for caption in generated.captions)
        return f"needs captions, and {missing} of {len(generated)} pictures have none; put a .txt file beside each"
    if metric.inputs == COMPOSITION:
        try:
            for caption in generated.captions:
                parse_caption(caption)
        except DataError:
            return "needs captions of the shapes world"
    return ""


def measure(
    result: Result, wanted: list[Metric], generated: PictureSet, real: PictureSet | Statistics, networks: Networks
) -> None:
    """Compute the metrics into a result. Raises DataError, ModelError."""
    features: dict[str, np.ndarray] = {}
    for one in wanted:
        if one.features not in (None, *features) and one.inputs != "pairs":
            features[one.features] = networks.embed(one.features, generated)
        compute: Callable = partial(one.compute, seed=SEED)
        match one.inputs:
            case "composition":
                # A value for each attribute of each kind of scenes: composition.seen.single.colour and so on.
                for score in one.compute(generated, generated.captions)["scores"]:
                    name = ".".join((COMPOSITION, score["split"], score["scenes"], score["attribute"]))
                    details = {key: score[key] for key in ("chance", "pictures")}
                    measured = Measured(score["value"], score["low"], score["high"], details, (score["right"],))
                    result.add(name, one, measured)
                continue
            case "features":
                measured = compute(features[one.features], networks.embed(one.features, real, keep=True))
            case "texts":
                texts = networks[one.features].embed_texts(generated.captions)
                measured = compute(features[one.features], texts, logit_scale=networks[one.features].logit_scale)
            case "single":
                measured = compute(features[one.features])
            case _:
                measured = compute(generated, real, *([networks[one.features]] if one.features else []))
        result.add(one.name, one, measured)


def names_of(metrics: Iterable[str]) -> set[str]:
    """The names that were asked for, of those of a result."""
    return {COMPOSITION if name.startswith(f"{COMPOSITION}.") else name for name in metrics}
