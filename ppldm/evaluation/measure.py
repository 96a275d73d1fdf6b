"""From two sets of pictures to a result: which metrics, by which networks, each computed once.

A metric is asked for by its name, or with the network whose features it is to use: `fid`, `frechet:dinov2`. By default
all are computed that need no network, and those of the networks that are given.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..demo.shapes_world.captions import parse_caption
from ..utils.checksums import digest_of
from ..utils.errors import ConfigError, DataError
from ..utils.files import atomic_write, make_output_dir
from ..utils.log import get_logger
from ..utils.text import did_you_mean
from .composition import grade_pictures
from .features.base import NETWORKS, FeatureNetwork, load_features
from .metrics.base import METRICS, Metric
from .metrics.bootstrap import Measured
from .pictures import PictureSet
from .result import Result

COMPOSITION = "composition"
# `composition` takes pictures and their captions, and has several values (`composition.py`).
_GRADES = Metric(COMPOSITION, COMPOSITION, None, True, grade_pictures, {"interval": "Wilson, 95%"}, 1)
KNOWN = METRICS | {COMPOSITION: _GRADES}
SEED = 0  # of what metrics draw: subsets, projections, bootstrap


@dataclass(frozen=True)
class Wanted:
    """A metric under the name it goes by in results, and the network whose features it takes, if any. asked: by name,
    so that what stands in its way is an error and no reason to leave it out."""

    name: str
    metric: Metric
    network: str | None
    asked: bool


def choose_metrics(
    words: Sequence[str], given: Mapping[str, str | None], paired: bool = False
) -> tuple[list[Wanted], dict[str, str]]:
    """(metrics to compute, those left out with the reason). given: paths of networks by name. paired: each picture is
    made from a real one, so that those for pairs are on by default as well.

    Raises ConfigError for names that are not known and for networks that are not given.
    """
    if not words:
        usual = {name: metric for name, metric in KNOWN.items() if paired or metric.inputs != "pairs"}
        found = [Wanted(name, metric, metric.features, False) for name, metric in usual.items()]
        missing = {one.name: _missing(one.network, given) for one in found}
        return [one for one in found if not missing[one.name]], {name: why for name, why in missing.items() if why}
    found = [_parse(word) for word in dict.fromkeys(words)]
    for one in found:
        if why := _missing(one.network, given):
            raise ConfigError(f"--metrics {one.name} {why}, {NETWORKS[one.network].given_by}")
    return found, {}


def _parse(word: str) -> Wanted:
    name, colon, network = word.partition(":")
    if name not in KNOWN:
        raise ConfigError(f"no metric {name!r}; {did_you_mean(name, KNOWN)}")
    metric = KNOWN[name]
    if not colon:
        return Wanted(name, metric, metric.features, True)
    if metric.features is None:
        raise ConfigError(f"--metrics {word}: {name} uses no features; write {name}")
    if network not in NETWORKS:
        raise ConfigError(f"--metrics {word}: no network {network!r}; {did_you_mean(network, NETWORKS)}")
    if NETWORKS[network].of_pairs != (metric.inputs == "pairs"):
        raise ConfigError(f"--metrics {word}: {name} takes no features of {network}; write {name}")
    return Wanted(word, metric, network, True)


def _missing(network: str | None, given: Mapping[str, str | None]) -> str:
    """Why a network is not at hand; "" where it is."""
    if network is None or NETWORKS[network].flag is None or given.get(network):
        return ""
    return f"needs {NETWORKS[network].flag}"


class Networks:
    """Feature networks by name, loaded when they are first asked for. paths: or names of what is published, fetched
    unless `offline`. conventions: by name, where not the usual one.
    cache: folder in which features are kept by all that they depend on."""

    def __init__(
        self,
        paths: Mapping[str, str | None],
        conventions: Mapping[str, str | None],
        device: str | None,
        offline: bool,
        cache: Path,
    ):
        self._paths, self._conventions, self._cache = paths, conventions, cache
        self._device, self._offline = device, offline
        self._loaded: dict[str, FeatureNetwork] = {}

    def __getitem__(self, name: str) -> FeatureNetwork:
        """Raises ConfigError, ModelError."""
        if name not in self._loaded:
            self._loaded[name] = load_features(
                *(name, self._paths.get(name), self._conventions.get(name), self._device, self._offline)
            )
        return self._loaded[name]

    def settings(self, name: str) -> dict:
        """What a result says of a network."""
        return {"digest": self[name].digest, "convention": self[name].convention}

    def embed(self, name: str, pictures: PictureSet, keep: bool = False) -> np.ndarray:
        """Features [N, dim] float32. keep: take them from the cache, and leave them there. Raises DataError where they
        are not finite."""
        path = self._cache / f"{name}-{digest_of([self.settings(name), pictures.digest])}.npy"
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
            make_output_dir(self._cache)
            with atomic_write(path) as file:
                np.save(file, features)
        return features


def check(wanted: Wanted, generated: PictureSet, real: PictureSet) -> str:
    """Why a metric cannot be computed of these sets; "" where it can."""
    of_both = wanted.metric.inputs in ("features", "pictures", "pairs")
    for what, pictures, flag in (("generated", generated, "--num-samples"), ("real", real, "--num-real")):
        if (of_both or what == "generated") and len(pictures) < wanted.metric.least:
            return f"needs {wanted.metric.least} {what} pictures, and there are {len(pictures)}; raise {flag}"
    sizes = generated.facts["size"], real.facts["size"]
    if wanted.metric.inputs in ("pictures", "pairs") and (sizes[0] != sizes[1] or "mixed" in sizes):
        return f"needs pictures of one size, and they are {sizes[0]} and {sizes[1]}; give --resolution"
    if wanted.metric.inputs == "pairs" and len(generated) != len(real):
        return f"compares pictures pair by pair, and there are {len(generated)} and {len(real)}"
    if wanted.metric.inputs in ("texts", COMPOSITION) and not all(generated.captions):
        missing = sum(not caption for caption in generated.captions)
        return f"needs captions, and {missing} of {len(generated)} pictures have none; put a .txt file beside each"
    if wanted.metric.inputs == COMPOSITION:
        try:
            for caption in generated.captions:
                parse_caption(caption)
        except DataError:
            return "needs captions of the shapes world"
    return ""


def state_settings(result: Result, wanted: Sequence[Wanted], networks: Networks) -> None:
    """Write into a result what its metrics will depend on."""
    for one in wanted:
        if one.network is not None:
            result.settings[f"features.{one.network}"] = networks.settings(one.network)
        result.settings[f"metrics.{one.name}"] = {**one.metric.settings, "network": one.network, "seed": SEED}


def measure(
    result: Result, wanted: Sequence[Wanted], generated: PictureSet, real: PictureSet, networks: Networks
) -> None:
    """Compute the metrics into a result. Raises DataError, ModelError."""
    features: dict[str, np.ndarray] = {}
    for one in wanted:
        if one.network not in (None, *features) and one.metric.inputs != "pairs":
            features[one.network] = networks.embed(one.network, generated)
        if one.metric.inputs == COMPOSITION:
            # A value for each attribute of each kind of scenes: composition.seen.single.colour and so on.
            for score in one.metric.compute(generated, generated.captions)["scores"]:
                name = ".".join((COMPOSITION, score["split"], score["scenes"], score["attribute"]))
                details = {key: score[key] for key in ("chance", "pictures")}
                measured = Measured(score["value"], score["low"], score["high"], details, (score["right"],))
                result.add(name, one.metric, measured)
            continue
        inputs = _inputs(one, features, generated, real, networks)
        scale = {"logit_scale": networks[one.network].logit_scale} if one.metric.inputs == "texts" else {}
        result.add(one.name, one.metric, one.metric.compute(*inputs, seed=SEED, **scale))


def names_of(metrics: Iterable[str]) -> set[str]:
    """The names that were asked for, of those of a result."""
    return {COMPOSITION if name.startswith(f"{COMPOSITION}.") else name for name in metrics}


def _inputs(one: Wanted, features: dict, generated: PictureSet, real: PictureSet, networks: Networks) -> tuple:
    match one.metric.inputs:
        case "features":
            return features[one.network], networks.embed(one.network, real, keep=True)
        case "texts":
            return features[one.network], networks[one.network].embed_texts(generated.captions)
        case "single":
            return (features[one.network],)
        case _:
            return generated, real, *([networks[one.network]] if one.network else [])
