"""LoRA files: .safetensors, float32 or float16, in diffusers' keys and in kohya's.

diffusers   unet.down_blocks.0.….to_q.lora_A.weight and .lora_B.weight, or transformer.… and prior.…; before 0.22
            .lora.down.weight, .lora_linear_layer.down.weight, ….attn1.processor.to_q_lora.down.weight
kohya       lora_unet_down_blocks_0_…_to_q.lora_down.weight, .lora_up.weight and .alpha, and lora_te_…; the UNet's
            blocks also by CompVis' numbers (lora_unet_input_blocks_1_1_…), as those of Stable Diffusion XL always are,
            whose text encoders are lora_te1_… and lora_te2_…

A pair changes a weight (Hu et al. 2021, arXiv:2106.09685): W + alpha / r * up @ down, in PyTorch's orientation. In
kohya's form alpha stands beside each pair. In diffusers' alpha is the rank, the largest of its component, which all
versions of its loader scale alike: up is multiplied by alpha / rank, and smaller ranks are filled with zeros. Else the
settings of peft's LoraConfig say it, in the header (`lora_adapter_metadata`, of diffusers from 0.35) or in
adapter_config.json beside the file: lora_alpha / r, with use_rslora lora_alpha / sqrt(r), but for layers that patterns
name. Settings that are not known here are refused.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from ...config.network_files import CONFIG_DIR
from ...utils.errors import ModelError
from ...utils.files import atomic_write, parse_json_object, read_json_object
from ..components import cast, require_finite, turn_linear
from ..formats.files import is_pytorch, read_arrays, read_metadata
from ..names import Unmapped, rename, unet_names

COMPONENTS = ("unet", "text_encoder", "text_encoder_2", "transformer", "prior")
KOHYA_PREFIXES = {"unet": "lora_unet_", "text_encoder": "lora_te_", "text_encoder_2": "lora_te2_"}
_THEIR_PREFIXES = {"lora_unet_": "unet", "lora_te_": "text_encoder", "lora_te1_": "text_encoder",
                   "lora_te2_": "text_encoder_2"}  # fmt: skip
PEFT_PREFIX = "base_model.model."
_COMFY = re.compile(r"(?:(?:model\.)?diffusion_model|(?:text_encoders\.)?clip_[lhg]\.transformer)\.")
# Words with underscores in the names of layers, of which kohya has dots as underscores: diffusers', then CompVis'.
_WORDS = (
    "down_blocks|up_blocks|mid_block|transformer_blocks|proj_in|proj_out|to_q|to_k|to_v|to_out|conv_in|conv_out|"
    "conv_shortcut|time_emb_proj|time_embedding|add_embedding|linear_1|linear_2|"
    "text_model|self_attn|q_proj|k_proj|v_proj|out_proj|to_logits|"
    "input_blocks|middle_block|output_blocks|in_layers|out_layers|emb_layers|skip_connection|time_embed|label_emb"
)
_WORD = re.compile(rf"(?:{_WORDS})(?=_|$)|[^_]+")
LONGEST_NAME = 300
_ARRAY = re.compile(r"(.+?)[._]lora(?:_linear_layer)?[._](A|B|down|up)(?:\.([^.]+))?\.weight")
_ALPHA = re.compile(r"(.+)\.alpha")
_COMPVIS = ("input_blocks", "middle_block", "output_blocks", "time_embed", "label_emb", "out")
# How layers begin where no component is named, as with attention processors and peft.
_BARE = {
    "unet": ("down_blocks.", "mid_block.", "up_blocks.", "conv_in", "conv_out", "time_embedding.", "add_embedding."),
    "text_encoder": ("text_model.",),
    "transformer": ("transformer_blocks.",),
}
# What attention processors called the layers of attention.
_OLD_UNET = {"to_out": "to_out.0"}
_OLD_TEXT = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
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
LORA_FILE = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for in a folder
_PEFT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_SHOWN = 3  # keys that a message lists


@dataclass(frozen=True)
class LoraPair:
    """Of a linear layer down [r, in], up [out, r]; of a convolution down [r, in, kh, kw], up [out, r, 1, 1]."""

    down: np.ndarray
    up: np.ndarray
    alpha: float

    @property
    def rank(self) -> int:
        """r, of at least 1."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: (out, in) or (out, in, kh, kw)."""
        return len(self.up), *self.down.shape[1:]

    @property
    def change(self) -> np.ndarray:
        """What is added to the weight, float32 of its shape."""
        down, up = (array.reshape(len(array), -1).astype(np.float32) for array in (self.down, self.up))
        return (self.alpha / self.rank * (up @ down)).reshape(self.shape)

    @property
    def squared_norm(self) -> float:
        """The sum of the squares of the change, without making it: the trace of (up' up) (down down')."""
        down, up = (array.reshape(len(array), -1).astype(np.float64) for array in (self.down, self.up))
        return (self.alpha / self.rank) ** 2 * float(np.sum((up.T @ up) * (down @ down.T)))


@dataclass(frozen=True)
class Lora:
    """Pairs by component ("unet", "text_encoder") and by layer ("down_blocks.0.attentions.0.to_q" as diffusers names
    it; "….to_out.0"). metadata: what is known of how they were trained."""

    components: dict[str, dict[str, LoraPair]]
    metadata: dict = field(default_factory=dict)
    source: str = "the LoRA"  # where it came from, for messages

    def cast(self, dtype: str) -> "Lora":
        """The same with arrays of that dtype."""

        def one(pair: LoraPair) -> LoraPair:
            return replace(pair, **cast({"down": pair.down, "up": pair.up}, dtype))

        found = self.components.items()
        return replace(self, components={name: {k: one(pair) for k, pair in own.items()} for name, own in found})


def read_lora(path, unet: dict | None = None) -> Lora:
    """The pairs of a file, or of a folder with one. unet: the config of its UNet, if layers have CompVis' numbers and
    it is not Stable Diffusion's. Raises ModelError for a file that is damaged, or holds anything else."""
    path = find_lora(path)
    arrays = read_arrays(path)
    arrays = arrays if is_pytorch(path) else turn_linear(arrays)
    keys = {key: read_key(key, unet) for key in arrays}
    if unknown := sorted(key for key, found in keys.items() if found is None):
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        if any("dora_scale" in key or "lora_magnitude_vector" in key for key in unknown):
            raise ModelError(f"{path} is a DoRA ({unknown[0]}), which is not supported; give a LoRA")
        raise ModelError(
            f"{path} holds {', '.join(unknown[:_SHOWN]):.300}{more}, which is not a LoRA of a UNet or its text encoder "
            "in diffusers' or kohya's keys; convert it with the program that made it"
        )
    if not arrays:
        raise ModelError(f"{path} holds no LoRA; give another file")
    if len(names := sorted(adapter_names(arrays))) > 1:
        raise ModelError(
            f"{path} holds several adapters ({', '.join(names[:_SHOWN])}); write each to a file of its own"
        )
    found: dict[str, dict] = defaultdict(lambda: defaultdict(dict))
    for key, (component, layer, array) in keys.items():
        if array in found[component][layer]:
            raise ModelError(f"{path} holds {component} {layer} twice, in two forms ({key}); make it again")
        found[component][layer][array] = arrays[key]
    metadata = {key: value for key, value in read_metadata(path).items() if key != "format"}
    said = read_settings(path, metadata, any(PEFT_PREFIX in key or adapter_names([key]) for key in arrays))
    plain = plain_alpha(metadata, any(key.startswith(tuple(KOHYA_PREFIXES.values())) for key in arrays))
    components = {
        component: {
            layer: _pair(own, f"{path}: {component} {layer}", layer, said.get(component) or said.get("") or {}, plain)
            for layer, own in layers.items()
        }
        for component, layers in found.items()
    }
    return Lora(components, metadata, str(path))


def find_lora(path) -> Path:
    """The file of a folder, diffusers' or else peft's; a file itself."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return path
    return next((path / name for name in (LORA_FILE, *_PEFT_FILES) if (path / name).is_file()), path / LORA_FILE)


def write_lora(lora: Lora, path, form: str = "diffusers") -> Path:
    """Write the pairs to `path`, or to LORA_FILE in it where it does not end in .safetensors; which file is returned.
    `form`: diffusers or kohya. Raises ModelError for a layer that it has no name for."""
    path = Path(path)
    path = path if path.suffix == ".safetensors" else path / LORA_FILE
    arrays, xl = {}, _is_sdxl(lora)
    for component, layers in lora.components.items():
        largest = max((pair.rank for pair in layers.values()), default=0)
        for layer, pair in layers.items():
            down, up = (pair.down, pair.up) if form == "kohya" else _without_alpha(pair, largest)
            arrays[write_key(component, layer, "down", form, xl)] = down
            arrays[write_key(component, layer, "up", form, xl)] = up
            if form == "kohya":
                arrays[write_key(component, layer, "alpha", form, xl)] = np.float32(pair.alpha)
    require_finite(arrays, lora.source)
    contiguous = {key: np.array(array, order="C") for key, array in arrays.items()}
    own = {key: value for key, value in lora.metadata.items() if key not in STATED}  # alpha stands in the pairs
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in own.items()}
    if form == "kohya":
        metadata |= _kohya_metadata(lora)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(save(contiguous, metadata={**metadata, "format": "pt"}))
    return path


def _pair(arrays: dict[str, np.ndarray], where: str, layer: str, said: dict, plain: tuple | None) -> LoraPair:
    """The pair of a layer. `said`: the settings of its adapter; `plain`: what the header says of the scale besides.
    Raises ModelError where its arrays are not a pair, and where what the file says does not agree."""
    if missing := [name for name in ("down", "up") if name not in arrays]:
        raise ModelError(f"{where} lacks its {' and its '.join(missing)} matrix; copy the file again")
    down, up = arrays["down"], arrays["up"]
    shapes = f"down {list(down.shape)}, up {list(up.shape)}"
    fits = down.ndim in (2, 4) and up.ndim in (2, 4) and up.shape[1] == len(down) > 0 and set(up.shape[2:]) <= {1}
    if not fits or {down.dtype.kind, up.dtype.kind} != {"f"}:
        raise ModelError(f"{where} is not a pair of matrices ({shapes}, {down.dtype}); make the file again")
    rank, stated = len(down), stated_alpha(said, layer, len(down), where)
    array = arrays.get("alpha")
    if array is not None and (array.size != 1 or array.dtype.kind not in "fiu" or not np.isfinite(array).all()):
        raise ModelError(f"{where} has an alpha that is not a number; make the file again")
    if array is None and stated is None:
        if plain and plain[1] != rank:
            raise ModelError(
                f"{where} has rank {rank} and no alpha, and the header says {plain[0]} {plain[1]:g}: whether it is "
                "scaled by that is not clear; make the file again with alpha beside each pair"
            )
        return LoraPair(down, up, float(rank))
    alpha = stated if array is None else float(array.reshape(()))
    if stated is not None and abs(alpha - stated) > 1e-3 * abs(stated):
        raise ModelError(f"{where} has alpha {alpha:g}, and its settings say {stated:g}; make the file again")
    return LoraPair(down, up, alpha)


def _without_alpha(pair: LoraPair, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(down, up) of the same change, of that rank, whose alpha is the rank."""
    missing, scale = rank - pair.rank, pair.alpha / pair.rank
    up = pair.up if scale == 1 else (pair.up.astype(np.float64) * scale).astype(pair.up.dtype)
    down = np.pad(pair.down, [(0, missing)] + [(0, 0)] * (pair.down.ndim - 1))
    return down, np.pad(up, [(0, 0), (0, missing)] + [(0, 0)] * (up.ndim - 2))


def _kohya_metadata(lora: Lora) -> dict[str, str]:
    """What tools of kohya's form show: one rank and alpha, or "Dynamic" where layers differ."""

    pairs = [pair for layers in lora.components.values() for pair in layers.values()]
    said = zip(KOHYA_SAID, ({pair.rank for pair in pairs}, {pair.alpha for pair in pairs}), strict=True)
    numbers = {name: f"{values.pop():g}" if len(values) == 1 else "Dynamic" for name, values in said}
    return {"ss_network_module": "networks.lora", **numbers}


def read_key(key: str, unet: dict | None = None) -> tuple[str, str, str] | None:
    """(component, layer, "down", "up" or "alpha") of a key; None where it is of no form that is known. unet: the config
    of the UNet whose blocks CompVis' numbers count; by default Stable Diffusion's, of any version."""
    found = _ARRAY.fullmatch(key) or _ALPHA.fullmatch(key) if len(key) <= LONGEST_NAME else None
    if not found:
        return None
    name, array = found[1], "alpha" if found.re is _ALPHA else "down" if found[2] in ("A", "down") else "up"
    theirs, comfy = next((one for one in _THEIR_PREFIXES if name.startswith(one)), None), _COMFY.match(name)
    if theirs or comfy:
        own = {"diffusion_model": "unet", "clip_g": "text_encoder_2"}
        found_in = (name for part, name in own.items() if comfy and part in comfy[0])
        component = _THEIR_PREFIXES[theirs] if theirs else next(found_in, "text_encoder")
        layer = ".".join(_WORD.findall(name.removeprefix(theirs))) if theirs else name[comfy.end() :]
        named = _diffusers_name(layer, unet)
        return (component, named, array) if named else None
    component, _, layer = name.removeprefix(PEFT_PREFIX).partition(".")
    if component not in COMPONENTS:
        layer = name.removeprefix(PEFT_PREFIX)
        component = next((one for one, starts in _BARE.items() if layer.startswith(starts)), "")
    layer = layer.removeprefix(PEFT_PREFIX)
    start, dot, last = layer.replace(".processor.", ".").rpartition(".")
    old = _OLD_TEXT if component.startswith("text_encoder") else _OLD_UNET
    return (component, f"{start}{dot}{old.get(last, last)}", array) if component else None


def adapter_names(keys) -> set[str]:
    """The names of adapters of peft that keys hold."""
    return {found[3] for found in map(_ARRAY.fullmatch, keys) if found and found[3]}


def write_key(component: str, layer: str, array: str, form: str, xl: bool = False) -> str:
    """The key of an array in a file of that form; xl: of Stable Diffusion XL. Raises ModelError for a layer that
    kohya's form has no name for."""
    if form == "diffusers":
        return f"{component}.{layer}.lora_{'A' if array == 'down' else 'B'}.weight"
    if component.startswith("text_encoder") and not layer.startswith("text_model."):
        raise ModelError(
            f"kohya's files know no layer {layer} of a text encoder that is not CLIP's; write the LoRA for diffusers"
        )
    if component not in KOHYA_PREFIXES:
        raise ModelError(f"kohya's files know no {component}; write the LoRA for diffusers")
    if xl and component == "unet":
        try:
            layer = rename(layer, {ours: theirs for theirs, ours in _published_names("unet_sdxl").items()})
        except Unmapped as error:
            raise ModelError(f"kohya's files of SDXL know no layer {error}; write the LoRA for diffusers") from error
    name = ("lora_te1_" if xl and component == "text_encoder" else KOHYA_PREFIXES[component]) + layer.replace(".", "_")
    return f"{name}.alpha" if array == "alpha" else f"{name}.lora_{array}.weight"


def _diffusers_name(layer: str, unet: dict | None) -> str | None:
    """diffusers' name of a layer of kohya's, which may be CompVis'; None for one that the UNet does not have."""
    if layer.split(".")[0] not in _COMPVIS:
        return layer
    # Of Stable Diffusion and XL no number stands for two layers.
    own = unet and {theirs: ours for ours, theirs in unet_names(unet).items()}
    try:
        return rename(layer, own or _published_names("unet") | _published_names("unet_sdxl"))
    except Unmapped:
        return None


@cache
def _published_names(config: str) -> dict[str, str]:
    """CompVis' prefixes to diffusers', of a UNet of the package."""
    names = unet_names(read_json_object(CONFIG_DIR / f"{config}.json", ModelError))
    return {theirs: ours for ours, theirs in names.items()}


def _is_sdxl(lora: Lora) -> bool:
    """Whether it is known to be of Stable Diffusion XL: by its UNet's deepest blocks, or by two text encoders."""
    deep = any("block.attentions.0.transformer_blocks.9." in layer for layer in lora.components.get("unet", ()))
    return deep or "text_encoder_2" in lora.components


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
    """The alpha of a layer's pair by the settings, None where there are none. Raises ModelError for another rank."""
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
