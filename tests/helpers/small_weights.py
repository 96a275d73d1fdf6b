"""Small whole models with random weights, in the form that every other form is made from."""

import json
from functools import cache
from pathlib import Path

import numpy as np
from ppdiffusers import AutoencoderKL, UNet2DConditionModel
from ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel
from ppdiffusers.transformers import CLIPTextConfig, CLIPTextModel
from tokenizers.pre_tokenizers import ByteLevel

from ppldm.weights.components import ComponentWeights, Weights, turn_linear
from ppldm.weights.configs import PUBLISHED_SCHEDULE, complete_config
from ppldm.weights.formats.files import write_safetensors

# CompVis' classes fix 32 groups, and heads of 64 in the text encoder. A side of 16 pixels is 8 x 8 latents.
UNET = {
    "sample_size": 8,
    "block_out_channels": [32, 64, 64],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 4,
    "cross_attention_dim": 32,
}
VAE = {
    "sample_size": 64,
    "block_out_channels": [32, 32, 64, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "scaling_factor": 0.3,
}
TEXT_ENCODER = {
    "vocab_size": 60,
    "max_position_embeddings": 77,
    "encoder_layers": 2,
    "encoder_ffn_dim": 128,
    "encoder_attention_heads": 8,
    "head_dim": 64,
    "d_model": 32,
    "dropout": 0.0,
}
CONFIGS = {"vae": VAE, "text_encoder": TEXT_ENCODER, "unet": UNET}


def small_weights(seed: int = 0, unet: dict | None = None, prediction_type: str = "epsilon") -> Weights:
    """Weights of a size at which activations stay near 1; norms are not at their initial values."""
    rng = np.random.default_rng(seed)
    components = {}
    for kind, changes in (("vae", {}), ("text_encoder", {}), ("unet", unet or {})):
        config = complete_config(kind, CONFIGS[kind] | changes, kind)
        components[kind] = ComponentWeights(
            config, {name: _draw(rng, name, shape) for name, shape in _shapes(kind, json.dumps(config))}, kind
        )
    return Weights(components, {**PUBLISHED_SCHEDULE, "prediction_type": prediction_type})


CLIP = {
    "vocab_size": 520,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
}


def write_clip(folder: Path, seed: int = 0) -> Path:
    """text_encoder/ and tokenizer/ of a small CLIP, in PyTorch's form, in `folder`; gives text_encoder/."""
    config = complete_config("text_encoder", CLIP, "clip")
    rng = np.random.default_rng(seed)
    layer = CLIPTextModel(CLIPTextConfig(**config))
    arrays = {name: _draw(rng, name, value.shape) for name, value in layer.state_dict().items()}
    (folder / "text_encoder").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    write_safetensors(folder / "text_encoder" / "model.safetensors", turn_linear(arrays), "pt")
    (folder / "text_encoder" / "config.json").write_text(json.dumps({"architectures": ["CLIPTextModel"], **config}))
    letters = ByteLevel.alphabet()
    merges = [("r", "e"), ("re", "d</w>"), ("l", "u"), ("b", "lu"), ("blu", "e</w>"), ("1", "2</w>")]
    tokens = [*sorted(letters), *(f"{letter}</w>" for letter in sorted(letters)), *("".join(pair) for pair in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    assert len(tokens) == CLIP["vocab_size"]
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return folder / "text_encoder"


def differences(one: Weights, other: Weights) -> list[str]:
    """Where two models differ: in a config, in a name, or in a bit of an array."""
    found = [f"part {kind}" for kind in one.components.keys() ^ other.components.keys()]
    for kind in one.components.keys() & other.components.keys():
        a, b = one.components[kind], other.components[kind]
        found += [f"{kind} config {key}" for key in a.config | b.config if a.config.get(key) != b.config.get(key)]
        found += [f"{kind} {name}" for name in a.arrays.keys() ^ b.arrays.keys()]
        found += [
            f"{kind} {name}" for name in a.arrays.keys() & b.arrays.keys() if not _same(a.arrays[name], b.arrays[name])
        ]
    return found


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )


@cache
def _shapes(kind: str, config: str) -> list[tuple[str, list[int]]]:
    """Of the weights of a config in JSON, by name."""
    config = json.loads(config)
    if kind == "text_encoder":
        layer = LDMBertModel(LDMBertConfig(**config))
    else:
        layer = {"vae": AutoencoderKL, "unet": UNet2DConditionModel}[kind](**config)
    return [(name, value.shape) for name, value in layer.state_dict().items()]


def _draw(rng, name: str, shape) -> np.ndarray:
    scale = 1.0 if len(shape) < 2 else 1.0 / np.sqrt(np.prod(shape[1:]) if len(shape) == 4 else shape[0])
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1 if len(shape) < 2 else scale)
    return values + np.float32("norm" in name and name.endswith("weight"))
