"""What a LoRA file says of the scale of its pairs besides arrays called alpha: the settings of peft's LoraConfig.

diffusers from 0.35 writes them into the header of a .safetensors file, as the JSON of `lora_adapter_metadata` with the
component before each ("unet.lora_alpha"); peft writes adapter_config.json beside its file. A pair of rank r is scaled
by lora_alpha / r, or with use_rslora by lora_alpha / sqrt(r); alpha_pattern and rank_pattern name layers with others. A
setting that changes what an adapter does and is not known here is refused by its name.
"""

import math
import re
from pathlib import Path

from ...utils.errors import ModelError
from ...utils.files import parse_json_object, read_json_object
from .keys import LONGEST_NAME

ADAPTER_CONFIG = "adapter_config.json"
HEADER = "lora_adapter_metadata"
# Of the header, a scale without a component, by several programs; kohya's holds only for keys of its own form.
_PLAIN = ("lora_alpha", "network_alpha", "alpha")
KOHYA_SAID = ("ss_network_dim", "ss_network_alpha")
STATED = (HEADER, *_PLAIN, *KOHYA_SAID)  # what no longer holds when the pairs are written in another form
# What says how an adapter was trained or loaded, and nothing of what it adds.
_HARMLESS = {
    "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "target_modules",
    "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_config", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    "peft_version", "ensure_weight_tying", "modules_to_save", "trainable_token_indices",
}  # fmt: skip
# Starts that change the weights below the adapter are refused: of those the file does not hold the change.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_NEUTRAL = {"peft_type": (None, "LORA"), "bias": (None, "none"), "init_lora_weights": _PLAIN_STARTS}
_MOST_PATTERNS, _MOST_EXPRESSIONS = 4096, 16
_NAME, _PATTERN = re.compile(r"[\w.-]+"), re.compile(r"[\w.*^$\\-]+")


def read_settings(path: Path, metadata: dict[str, str], by_peft: bool) -> dict[str, dict]:
    """The settings of each component by what `path` says, of all under "" where none is named; those of adapter_config
    .json only for keys of peft's. Raises ModelError for one that is of another kind, or not known."""
    found: dict[str, dict] = {}
    if by_peft and (path.parent / ADAPTER_CONFIG).exists():
        found[""] = read_json_object(path.parent / ADAPTER_CONFIG, ModelError, inside=True)
    if HEADER in metadata:
        said = parse_json_object(metadata[HEADER], f"{path}: {HEADER} of its header", ModelError)
        for name, value in said.items():
            component, dot, setting = name.partition(".")
            found.setdefault(component if dot else "", {})[setting if dot else name] = value
    for component, settings in found.items():
        _check(settings, f"{path}: the settings of {component or 'its adapter'}")
    return found


def stated_alpha(settings: dict, layer: str, rank: int, where: str) -> float | None:
    """The alpha of a layer's pair, which is scaled by alpha / rank; None where the settings name none. Raises
    ModelError where they have another rank."""
    if not settings:
        return None
    said = _of_layer(settings, "rank_pattern", layer, settings.get("r", rank))
    if said != rank:
        raise ModelError(f"{where} has rank {rank}, and the file says {said}; copy or make the file again")
    alpha = _of_layer(settings, "alpha_pattern", layer, settings.get("lora_alpha"))
    if alpha is None:
        raise ModelError(f"{where}: the file describes its adapter without lora_alpha, so its scale is not known")
    return float(alpha) * (math.sqrt(rank) if settings.get("use_rslora") else 1.0)


def plain_alpha(metadata: dict[str, str], by_kohya: bool) -> tuple[str, float] | None:
    """(name, value) of a scale that a header states for the whole file."""
    for name in (KOHYA_SAID[1],) if by_kohya else _PLAIN:
        try:
            return name, float(metadata[name])
        except (KeyError, ValueError):  # "Dynamic"
            continue
    return None


def _check(settings: dict, where: str) -> None:
    for name, value in settings.items():
        if name in ("lora_alpha", "r"):
            _require(_is_number(value), where, name, value, "is not a number")
        elif name in ("alpha_pattern", "rank_pattern"):
            whole = value is None or (isinstance(value, dict) and all(map(_is_number, value.values())))
            _require(whole, where, name, value, "does not give a number to each layer")
            odd = _odd_pattern(value or {})
            _require(odd is None, where, name, odd, "is no name of a layer that is supported")
        elif name == "use_rslora":
            _require(value in (True, False, None), where, name, value, "is not true or false")
        elif name in _NEUTRAL:
            _require(value in _NEUTRAL[name], where, name, value, "is not supported")
        elif name not in _HARMLESS:
            _require(not value, where, name, value, "is not supported")  # use_dora, and what future versions add


def _require(holds: bool, where: str, name: str, value, what: str) -> None:
    if not holds:
        raise ModelError(f"{where}: {name} {value!r:.80} {what}; convert the LoRA with the program that made it")


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def _odd_pattern(patterns: dict) -> str | None:
    """One that is not sought in no time, as names are, and a few expressions with one repeat."""
    expressions = [one for one in patterns if not _NAME.fullmatch(one)]
    if len(patterns) > _MOST_PATTERNS or len(expressions) > _MOST_EXPRESSIONS:
        return next(iter(patterns))
    for one in patterns:
        try:
            if len(one) > LONGEST_NAME or one.count("*") > 1 or not _PATTERN.fullmatch(one) or not re.compile(one):
                return one
        except re.error:
            return one
    return None


def _of_layer(settings: dict, name: str, layer: str, default):
    """What a pattern says of a layer: by peft's rule the first that the end of its name matches."""
    ends = {layer[start:] for start in (0, *(match.end() for match in re.finditer(r"\.", layer)))}
    for one, value in (settings.get(name) or {}).items():
        if one in ends or (not _NAME.fullmatch(one) and re.match(rf"(?:.*\.)?(?:{one})$", layer)):
            return value
    return default
