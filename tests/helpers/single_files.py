"""Small Stable Diffusions with random weights, and single files of them in CompVis' names, with their own CLIP."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from ppdiffusers.transformers import CLIPTextConfig, CLIPTextModel
from safetensors.numpy import save_file
from small_weights import _draw, small_weights

from ppldm.weights.components import ComponentWeights, Weights, turn_linear
from ppldm.weights.configs import complete_config
from ppldm.weights.formats.torch_files import write_torch
from ppldm.weights.layouts import compvis
from ppldm.weights.names import rename

# Layout: what of its configs differs. Heads are 8, or as wide as 64; an old file has no `text_model` in its names.
UNETS = {"1.x": {"attention_head_dim": 8}, "2.x": {"attention_head_dim": [1, 1, 1], "use_linear_projection": True}}
UNETS["old"] = UNETS["1.x"]
WIDTH = 32
_BLOCK = {
    "self_attn.out_proj": "attn.out_proj", "layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}  # fmt: skip
_AS_CKPT = (
    "import sys, torch, safetensors.torch as st; torch.save({'state_dict': st.load_file(sys.argv[1])}, sys.argv[2])"
)


def small_stable_diffusion(layout: str, seed: int = 0, vocab_size: int = 520, unet: dict | None = None) -> Weights:
    own = {"sample_size": 64, "in_channels": 4, "out_channels": 4, **UNETS[layout], **(unet or {})}
    weights = small_weights(seed, own)
    weights.components["vae"].config |= {"scaling_factor": 0.18215, "sample_size": 512}
    config = complete_config("text_encoder", {
        "vocab_size": vocab_size, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 1, "max_position_embeddings": 77,
        "hidden_act": "gelu" if layout == "2.x" else "quick_gelu",
        "layer_norm_eps": 1e-5, "projection_dim": 512 if layout == "2.x" else WIDTH,
    }, layout)  # fmt: skip
    rng = np.random.default_rng(seed)
    shapes = CLIPTextModel(CLIPTextConfig(**config)).state_dict().items()
    arrays = {name: _draw(rng, name, value.shape) for name, value in shapes}
    weights.components["text_encoder"] = ComponentWeights(config, arrays, layout)
    return weights


def single_file_names(weights: Weights, layout: str) -> dict[str, np.ndarray]:
    """The arrays as such a file has them."""
    found = dict(compvis.schedule_tables(weights.scheduler))
    for kind in ("unet", "vae"):
        component = weights.components[kind]
        names = compvis.NAMES[kind](component.config)
        for name, array in turn_linear(component.arrays).items():
            array = array[:, :, None, None] if compvis._is_convolution_there(kind, name) else array
            found[compvis.PREFIXES[kind] + rename(name, names)] = array
    text = turn_linear(weights.components["text_encoder"].arrays)
    make = {"1.x": _as_published, "old": _without_text_model, "2.x": _as_open_clip}[layout]
    return found | {f"cond_stage_model.{name}": array for name, array in make(text).items()}


def _as_published(text):
    numbers = {"transformer.text_model.embeddings.position_ids": np.arange(77)[None]}
    return {f"transformer.{name}": array for name, array in text.items()} | numbers


def _without_text_model(text):
    return {name.replace(".text_model.", ".", 1): array for name, array in _as_published(text).items()}


def _as_open_clip(text):
    """open_clip's TextTransformer: fused queries, keys and values; one layer more than is used, and a projection."""
    rng, found = np.random.default_rng(9), {}
    start, layers = "text_model.encoder.layers", 1 + max(int(n.split(".")[3]) for n in text if ".layers." in n)
    embeddings = "text_model.embeddings"
    found["model.token_embedding.weight"] = text[f"{embeddings}.token_embedding.weight"]
    found["model.positional_embedding"] = text[f"{embeddings}.position_embedding.weight"]
    for number in range(layers):
        own, block = f"{start}.{number}", f"model.transformer.resblocks.{number}"
        for leaf in ("weight", "bias"):
            qkv = [text[f"{own}.self_attn.{one}_proj.{leaf}"] for one in "qkv"]
            found[f"{block}.attn.in_proj_{leaf}"] = np.concatenate(qkv)
            for ours, theirs in _BLOCK.items():
                found[f"{block}.{theirs}.{leaf}"] = text[f"{own}.{ours}.{leaf}"]
    for name in [name for name in found if f".resblocks.{layers - 1}." in name]:
        unused = name.replace(f".resblocks.{layers - 1}.", f".resblocks.{layers}.")
        found[unused] = rng.standard_normal(found[name].shape, dtype=np.float32)
    for leaf in ("weight", "bias"):
        found[f"model.ln_final.{leaf}"] = text[f"text_model.final_layer_norm.{leaf}"]
    return found | {"model.text_projection": rng.standard_normal((WIDTH, 48), dtype=np.float32),
                    "model.logit_scale": np.array(4.6, np.float32)}  # fmt: skip


def write_single_file(path: Path, arrays: dict[str, np.ndarray], dtype: str = "float32", metadata=None) -> Path:
    """By its suffix, in float32, float16 or bfloat16 (which needs PyTorch)."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if dtype == "bfloat16":
        import torch
        from safetensors.torch import save_file as save_torch

        tensors = {
            name: torch.tensor(array).bfloat16() if array.dtype.kind == "f" else torch.tensor(array)
            for name, array in whole.items()
        }
        first = path.with_suffix(".safetensors")
        save_torch(tensors, str(first), metadata=metadata)
        if path.suffix != ".safetensors":  # elsewhere, for beside Paddle torch.save writes bfloat16 in another way
            subprocess.run([sys.executable, "-c", _AS_CKPT, str(first), str(path)], check=True)
        return path
    whole = {name: array.astype(dtype) if array.dtype.kind == "f" else array for name, array in whole.items()}
    if path.suffix == ".safetensors":
        save_file(whole, str(path), metadata=metadata)
    else:
        write_torch(path, whole, {"global_step": 3})
    return path
