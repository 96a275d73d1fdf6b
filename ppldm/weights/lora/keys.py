"""What the keys of LoRA files name: a component, a layer as diffusers calls it, and which of the two arrays.

diffusers   unet.down_blocks.0.attentions.0.….to_q.lora_A.weight and .lora_B.weight, or transformer.… and
            prior.…; before 0.22 .lora.down.weight, .lora_linear_layer.down.weight, and with attention processors
            ….attn1.processor.to_q_lora.down.weight, for which the component may be missing
kohya       lora_unet_down_blocks_0_attentions_0_…_to_q.lora_down.weight, .lora_up.weight and .alpha, with underscores
            in place of dots, and lora_te_…; the UNet's blocks also by CompVis' numbers (lora_unet_input_blocks_1_1_…)

kohya's underscores are ambiguous by themselves. Names of the networks have underscores in few words, which are listed
here; `merge.merge_lora` finds the layers of a model by their own names besides.
"""

import re
from typing import NamedTuple

from ...config.network_files import CONFIG_DIR
from ...utils.errors import ModelError
from ...utils.files import read_json_object
from ..names import Unmapped, rename, unet_names

FORMS = ("diffusers", "kohya")
COMPONENTS = ("unet", "text_encoder", "transformer", "prior")
KOHYA_PREFIXES = {"unet": "lora_unet_", "text_encoder": "lora_te_"}
_THEIR_PREFIXES = {"lora_unet_": "unet", "lora_te_": "text_encoder", "lora_te1_": "text_encoder"}
PEFT_PREFIX = "base_model.model."
_COMFY = re.compile(r"(?:(?:model\.)?diffusion_model|(?:text_encoders\.)?clip_[lh]\.transformer)\.")
# Words with underscores in the names of layers: those of diffusers' networks, then of CompVis'.
_WORDS = (
    "down_blocks|up_blocks|mid_block|transformer_blocks|proj_in|proj_out|to_q|to_k|to_v|to_out|conv_in|conv_out|"
    "conv_shortcut|time_emb_proj|time_embedding|add_embedding|linear_1|linear_2|"
    "text_model|self_attn|q_proj|k_proj|v_proj|out_proj|to_logits|"
    "input_blocks|middle_block|output_blocks|in_layers|out_layers|emb_layers|skip_connection|time_embed"
)
_WORD = re.compile(rf"(?:{_WORDS})(?=_|$)|[^_]+")
LONGEST_NAME = 300
_ARRAY = re.compile(r"(.+?)[._]lora(?:_linear_layer)?[._](A|B|down|up)(?:\.([^.]+))?\.weight")
_ALPHA = re.compile(r"(.+)\.alpha")
_COMPVIS = ("input_blocks", "middle_block", "output_blocks", "time_embed", "out")
# How layers begin where no component is named, as with attention processors and peft.
_BARE = {
    "unet": ("down_blocks.", "mid_block.", "up_blocks.", "conv_in", "conv_out", "time_embedding.", "add_embedding."),
    "text_encoder": ("text_model.",),
    "transformer": ("transformer_blocks.",),
}
# What attention processors called the layers of attention.
_OLD_UNET = {"to_out": "to_out.0"}
_OLD_TEXT = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


class Key(NamedTuple):
    """What one key names. array: "down", "up" or "alpha"."""

    component: str
    layer: str
    array: str


def read_key(key: str, unet: dict | None = None) -> Key | None:
    """What `key` names; None where it is of no form that is known.

    unet: the config of the UNet whose blocks CompVis' numbers count; by default Stable Diffusion's, of any version.
    """
    if len(key) > LONGEST_NAME:
        return None
    if found := _ARRAY.fullmatch(key):
        name, array = found[1], "down" if found[2] in ("A", "down") else "up"
    elif found := _ALPHA.fullmatch(key):
        name, array = found[1], "alpha"
    else:
        return None
    for prefix, component in _THEIR_PREFIXES.items():
        if name.startswith(prefix):
            layer = _diffusers_name(".".join(_WORD.findall(name.removeprefix(prefix))), unet)
            return Key(component, layer, array) if layer else None
    if found := _COMFY.match(name):
        component, layer = "unet" if "diffusion_model" in found[0] else "text_encoder", name[found.end() :]
        named = _diffusers_name(layer, unet)
        return Key(component, named, array) if named else None
    component, _, layer = name.removeprefix(PEFT_PREFIX).partition(".")
    if component not in COMPONENTS:
        layer = name.removeprefix(PEFT_PREFIX)
        component = next((one for one, starts in _BARE.items() if layer.startswith(starts)), "")
    layer = layer.removeprefix(PEFT_PREFIX)
    return Key(component, _modern(component, layer), array) if component else None


def adapter_names(keys) -> set[str]:
    """The names of adapters of peft that keys hold."""
    return {found[3] for found in map(_ARRAY.fullmatch, keys) if found and found[3]}


def write_key(component: str, layer: str, array: str, form: str) -> str:
    """The key of an array in a file of that form. Raises ModelError for a layer that kohya's form has no name for."""
    if form == "diffusers":
        return f"{component}.{layer}.lora_{'A' if array == 'down' else 'B'}.weight"
    if component == "text_encoder" and not layer.startswith("text_model."):
        raise ModelError(
            f"kohya's files know no layer {layer} of a text encoder that is not CLIP's; write the LoRA for diffusers"
        )
    if component not in KOHYA_PREFIXES:
        raise ModelError(f"kohya's files know no {component}; write the LoRA for diffusers")
    name = KOHYA_PREFIXES[component] + layer.replace(".", "_")
    return f"{name}.alpha" if array == "alpha" else f"{name}.lora_{array}.weight"


def _diffusers_name(layer: str, unet: dict | None) -> str | None:
    """diffusers' name of a layer of kohya's, which may be CompVis'; None for one that the UNet does not have."""
    if layer.split(".")[0] not in _COMPVIS:
        return layer
    config = unet or read_json_object(CONFIG_DIR / "unet.json", ModelError)
    try:
        return rename(layer, {theirs: ours for ours, theirs in unet_names(config).items()})
    except Unmapped:
        return None


def _modern(component: str, layer: str) -> str:
    start, dot, last = layer.replace(".processor.", ".").rpartition(".")
    old = _OLD_TEXT if component == "text_encoder" else _OLD_UNET
    return f"{start}{dot}{old.get(last, last)}"
