"""Networks that hold the weights of components, and components of networks that are there."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import numpy as np
import paddle
from ppdiffusers import AutoencoderKL

from ..families.base import Family
from ..networks.build import UNBUILDABLE, make_network
from ..networks.configs import LABELS
from ..utils.checksums import checksum_arrays
from ..utils.errors import ModelError
from .components import ComponentWeights
from .configs import complete_config
from .formats.files import within_file
from .model_file import (
    TOKENIZER_FOLDER,
    Component,
    ModelDescription,
    TokenizerFiles,
    describe,
    kind_of,
    read_tokenizer_files,
)
from .source import read_component

_SHOWN = 5  # keys of each kind that a message lists


def load_vae(name_or_path) -> AutoencoderKL:
    """A trained VAE from a folder, a .ckpt or by name, in float32."""
    return fill_component("vae", read_component("vae", name_or_path))


def fill_component(kind: str, component: ComponentWeights):
    """A network with `component.arrays` in float32. Raises ModelError that lists missing, unexpected and misshapen
    keys, and before it is built for a far larger network."""
    with within_file(component):
        layer = _make(kind, component)
    fill_layer(layer, component.arrays, component.source, "their config")
    return layer


def fill_layer(layer, arrays: dict[str, np.ndarray], source, what: str) -> None:
    """Set all weights of a layer, in float32. Raises ModelError for `source`, whose weights do not fit `what`."""
    own = layer.state_dict()
    problems = [
        *_listed("missing", own.keys() - arrays.keys()),
        *_listed("unexpected", arrays.keys() - own.keys()),
        *_listed(
            "of another shape",
            (
                f"{name} {list(arrays[name].shape)} instead of {list(value.shape)}"
                for name, value in own.items()
                if name in arrays and list(arrays[name].shape) != list(value.shape)
            ),
        ),
    ]
    if problems:
        raise ModelError(f"the weights in {source} do not fit {what}: {'; '.join(problems)}")
    with paddle.no_grad():
        for name, value in own.items():
            value.set_value(np.asarray(arrays[name], np.float32, order="C"))


def _listed(what: str, names: Iterable[str]) -> list[str]:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"] if names else []


def _make(kind: str, component: ComponentWeights):
    try:
        return make_network(kind, component.config)
    except UNBUILDABLE as error:
        raise ModelError(
            f"{component.source}: the config makes no {LABELS[kind]} ({type(error).__name__}: {error}); copy it again"
        ) from error


def parameter_shapes(kind: str, config: dict, source: str = "") -> dict[str, list[int]]:
    """Of the network of a completed config, by name: no memory is taken for them. Raises ModelError."""
    with paddle.LazyGuard():
        layer = bare_network(kind, config, source)
    return {name: list(parameter.shape) for name, parameter in layer.named_parameters()}


def bare_network(kind: str, config: dict, source: str = ""):
    """The network of a completed config whose weights nobody sets: for what gives them no memory. Raises ModelError."""
    from ppdiffusers.models import controlnet

    with mock.patch.object(controlnet, "zero_module", lambda module: module):  # what has no memory cannot be zero
        return _make(kind, ComponentWeights(config, {}, source))


def config_of(kind: str, layer) -> dict:
    """The completed config of a built network."""
    return complete_config(kind, layer.config.to_dict() if "_encoder" in kind else dict(layer.config), kind)


def component_of(kind: str, layer) -> ComponentWeights:
    """The config and the weights of a built network, copied, in float32."""
    arrays = {name: value.astype("float32").numpy() for name, value in layer.state_dict().items()}
    return ComponentWeights(config_of(kind, layer), arrays, kind)


def describe_model(family: Family, model) -> ModelDescription:
    """What model.json says of a built model: with checksums of its frozen weights, which must be in float32 yet."""
    components = {}
    for name, component in model.components.items():
        arrays = ((key, value.numpy()) for key, value in component.layer.state_dict().items())
        checksum = None if component.trained else checksum_arrays(arrays)
        kind = kind_of(family, name)
        config = config_of(kind, component.layer) if kind in LABELS else dict(component.layer.config)
        components[name] = Component(config, component.trained, checksum)
    return describe(family.name, components, model.process_settings(), model.tokenizer and files_of(model.tokenizer))


def files_of(tokenizer) -> TokenizerFiles:
    """The files of a tokenizer as they are now, whatever becomes of the folder that it was read from."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder, TOKENIZER_FOLDER))
        return read_tokenizer_files(Path(folder), tokenizer.max_length)
