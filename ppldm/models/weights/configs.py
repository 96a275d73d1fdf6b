"""Configs of parts: read from JSON, completed with the defaults of ppdiffusers' classes, and checked against them."""

import inspect
import json
from functools import cache
from pathlib import Path

from ...utils.errors import ModelError
from .parts import CLIP_KEYS, LDMBERT_KEYS, is_ldmbert, to_paddle_config

CONFIG_FILES = ("config.json", "model_config.json")  # the second is PaddleNLP's name before 2.5


# The blocks that ppdiffusers' classes run. It has others, whose forward fails in a network of this kind.
BLOCK_TYPES = {
    "unet": {
        *("DownBlock2D", "CrossAttnDownBlock2D", "ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        *("UpBlock2D", "CrossAttnUpBlock2D", "ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D", "AttnUpBlock2D"),
    },
    "vae": {"DownEncoderBlock2D", "AttnDownEncoderBlock2D", "UpDecoderBlock2D", "AttnUpDecoderBlock2D"},
}


def read_json(path) -> dict:
    """The object in a JSON file. Raises ModelError."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; give another")
    return value


def read_config(kind: str, folder: Path) -> dict:
    """The completed config of the part in `folder`. Raises ModelError."""
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            return complete_config(kind, _flat(read_json(folder / name)), folder / name)
    raise ModelError(f"the {kind} folder {folder} has no config.json; give the folder that holds it and the weights")


def complete_config(kind: str, config: dict, source) -> dict:
    """`config` as ppdiffusers' class takes it, with its defaults for what is not there.

    Raises ModelError for a setting that the class lacks, unless it is null and so asks for nothing.
    """
    config = to_paddle_config(kind, config, source)
    if not config:
        raise ModelError(f"{source} is no config of a {kind} that is known: neither LDMBert's nor CLIP's")
    defaults = _defaults("clip" if kind == "text_encoder" and not is_ldmbert(config) else kind)
    unknown = [key for key, value in config.items() if key not in defaults and value is not None]
    if unknown:
        raise ModelError(f"{source}: no setting {unknown[0]!r} is known for a {kind}; correct or remove it")
    for key, value in config.items():
        if key in defaults and not _is_like(value, defaults[key]):
            raise ModelError(f"{source}: {key} {value!r} is not of the kind of {defaults[key]!r}; correct it")
        if key.endswith(("dropout", "layerdrop")) and value is not None and not 0 <= value <= 1:
            raise ModelError(f"{source}: {key} {value!r} is no probability; correct it")
        if key in ("down_block_types", "up_block_types") and (odd := [one for one in value if not _runs(kind, one)]):
            known = ", ".join(sorted(BLOCK_TYPES[kind]))
            raise ModelError(f"{source}: {key} {odd[0]!r} does not run in a {kind} of ppdiffusers; known: {known}")
    return {**defaults, **{key: value for key, value in config.items() if key in defaults}}


def _runs(kind: str, block_type) -> bool:
    return isinstance(block_type, str) and block_type in BLOCK_TYPES[kind]


def _is_like(value, default) -> bool:
    """Whether a setting may have a value, by the kind of its default; what a class takes for one block, it takes as a
    list for all."""
    if default is None or value is None:
        return value is not None or not isinstance(default, float)
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, list) or isinstance(value, list):
        return isinstance(value, list) and not isinstance(default, float)
    return isinstance(value, (int, float))


@cache
def _defaults(kind: str) -> dict:
    if kind == "text_encoder":
        from ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig

        defaults = _signature(LDMBertConfig)
        return {key: defaults[key] for key in LDMBERT_KEYS}
    if kind == "clip":
        from ppdiffusers.transformers import CLIPTextConfig

        defaults = _signature(CLIPTextConfig)
        return {key: defaults[key] for key in CLIP_KEYS}
    from ppdiffusers import AutoencoderKL, UNet2DConditionModel

    return _signature({"vae": AutoencoderKL, "unet": UNet2DConditionModel}[kind])


def _signature(model_class) -> dict:
    parameters = inspect.signature(model_class.__init__).parameters.values()
    return {p.name: _plain(p.default) for p in parameters if p.default is not inspect.Parameter.empty}


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def _flat(config: dict) -> dict:
    """PaddleNLP's older configs keep the settings in `init_args`, one inside the other."""
    for inner in config.get("init_args", ()):
        if isinstance(inner, dict):
            config = {**config, **_flat(inner)}
    return {key: value for key, value in config.items() if key not in ("init_args", "init_class")}
