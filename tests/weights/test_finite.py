"""Weights that are not finite are not written, by any command in any form, and nothing is left of the try."""

import numpy as np
import pytest
from small_loras import small_lora
from small_weights import small_weights

from ppldm.cli.main import run
from ppldm.utils.errors import ModelError
from ppldm.weights.components import Weights
from ppldm.weights.lora.files import write_lora
from ppldm.weights.lora.merge import write_tokens
from ppldm.weights.write import write_cascade, write_component, write_weights

BAD = [np.nan, np.inf, -np.inf]


def spoiled(weights: Weights, kind: str, value) -> Weights:
    arrays = weights.components[kind].arrays
    name = next(name for name in arrays if name.endswith("weight"))
    arrays[name] = arrays[name].copy()
    arrays[name].flat[-1] = value
    return weights


@pytest.mark.parametrize("value", [*BAD, 1e5])
@pytest.mark.parametrize("kind", ["vae", "unet", "text_encoder"])
@pytest.mark.parametrize(
    "form, safetensors", [("ppdiffusers", False), ("diffusers", False), ("compvis", False), ("ppdiffusers", True)]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_model_in_every_form(tmp_path, form, safetensors, kind, value, dtype):
    weights = spoiled(small_weights(), kind, value)
    if value == 1e5 and dtype == "float32":
        write_weights(weights, form, tmp_path / "out", dtype, safetensors)
        return
    with pytest.raises(ModelError, match="is not written: 1 of .* numbers of .* are not finite") as caught:
        write_weights(weights, form, tmp_path / "out", dtype, safetensors)
    assert ("choose float32" in str(caught.value)) == (dtype == "float16")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("form", ["ppdiffusers", "diffusers"])
def test_a_component(tmp_path, form, value):
    weights = spoiled(small_weights(), "unet", value)
    with pytest.raises(ModelError, match="are not finite"):
        write_component("unet", weights.components["unet"], tmp_path / "unet", form)
    with pytest.raises(ModelError, match="no prior and no decoder"):
        write_cascade({"unet": weights.components["unet"]}, tmp_path / "c")


@pytest.mark.parametrize("value", [*BAD, 1e5])
@pytest.mark.parametrize("form", ["diffusers", "kohya"])
@pytest.mark.parametrize("side", ["down", "up"])
def test_a_lora(tmp_path, form, side, value):
    lora = small_lora({"unet": small_weights().components["unet"]}, of="to_q")
    pair = next(iter(lora.components["unet"].values()))
    getattr(pair, side).flat[0] = value
    with pytest.raises(ModelError, match="are not finite in float16" if value == 1e5 else "are not finite"):
        write_lora(lora.cast("float16") if value == 1e5 else lora, tmp_path / "new" / "lora.safetensors", form)
    assert not [*tmp_path.iterdir()]


def test_tokens(tmp_path):
    with pytest.raises(ModelError, match="1 of 8 numbers of <x>"):
        write_tokens({"<x>": np.array([0.0] * 7 + [np.nan], "f4")}, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_commands_that_write_weights(tmp_path):
    from safetensors.numpy import load_file, save_file

    write_weights(small_weights(), "diffusers", tmp_path / "good")
    write_weights(small_weights(), "diffusers", tmp_path / "bad")
    (tmp_path / "bad" / "ppldm.json").unlink()
    file = tmp_path / "bad" / "unet" / "diffusion_pytorch_model.safetensors"
    arrays = load_file(file)
    arrays["conv_in.weight"][0, 0, 0, 0] = np.nan
    save_file(arrays, file, {"format": "pt"})
    lora = write_lora(small_lora({"unet": small_weights().components["unet"]}, of="to_q"), tmp_path / "l.safetensors")
    pairs = load_file(lora)
    next(iter(pairs.values())).flat[0] = np.inf
    save_file(pairs, tmp_path / "bad.safetensors", {"format": "pt"})
    out, good, bad = (str(tmp_path / name) for name in ("out", "good", "bad"))
    for words in (
        ["export", bad, "--to", "diffusers"], ["export", good, "--lora", f"{bad}.safetensors"],
        ["lora", "merge", bad, "--lora", str(lora)], ["lora", "merge", good, "--lora", f"{bad}.safetensors:0.5"],
        ["lora", "convert", f"{bad}.safetensors", "--to", "kohya"], ["lora", "extract", "--base", good, "--tuned", bad],
    ):  # fmt: skip
        with pytest.raises(ModelError, match="not finite"):
            run([*words, "--out", out])
        assert not (tmp_path / "out").exists(), words
