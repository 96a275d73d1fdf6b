"""LoRA files beside PyTorch's diffusers and peft: they read ours and we read theirs, to the bit, and compute the same.
Needs requirements/parity.txt."""

import needs
import numpy as np
import paddle
import pytest
from small_loras import differences, small_lora
from small_weights import small_weights, write_clip

needs.need("parity")

import torch  # noqa: E402
from diffusers import StableDiffusionPipeline, UNet2DConditionModel  # noqa: E402
from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya  # noqa: E402
from peft.utils import get_peft_model_state_dict  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import CLIPTextModel  # noqa: E402

from ppldm.weights.components import Weights, to_torch_config, turn_linear  # noqa: E402
from ppldm.weights.fill import fill_component  # noqa: E402
from ppldm.weights.lora.files import read_lora, write_lora  # noqa: E402
from ppldm.weights.lora.merge import merge_lora  # noqa: E402
from ppldm.weights.source import read_component  # noqa: E402


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    clip = read_component("text_encoder", write_clip(folder))
    return Weights({"unet": small_weights().components["unet"], "text_encoder": clip}), folder / "text_encoder"


def theirs(base, file):
    """diffusers' UNet and CLIP with the file loaded, as its pipeline loads it."""
    weights, clip = base
    component = weights.components["unet"]
    unet = UNet2DConditionModel(**to_torch_config("unet", component.config, "")).eval()
    arrays = {name: torch.tensor(np.ascontiguousarray(one)) for name, one in turn_linear(component.arrays).items()}
    unet.load_state_dict(arrays)
    text_encoder = CLIPTextModel.from_pretrained(clip).eval()
    state, alphas = StableDiffusionPipeline.lora_state_dict(str(file), unet_config=unet.config)
    StableDiffusionPipeline.load_lora_into_unet(state, alphas, unet)
    StableDiffusionPipeline.load_lora_into_text_encoder(state, alphas, text_encoder, prefix="text_encoder")
    return unet, text_encoder


def compute_both(weights, unet, text_encoder):
    """The largest difference between our networks and theirs."""
    rng = np.random.default_rng(5)
    latents, text = rng.standard_normal((2, 4, 8, 8), "f4"), rng.standard_normal((2, 5, 32), "f4")
    ids = rng.integers(0, 500, (2, 77))
    our_unet, our_clip = (fill_component(kind, weights.components[kind]) for kind in ("unet", "text_encoder"))
    our_clip.eval()
    with paddle.no_grad(), torch.no_grad():
        ours = our_unet(paddle.to_tensor(latents), paddle.to_tensor([10, 700]), paddle.to_tensor(text)).sample.numpy()
        their = unet(torch.tensor(latents), torch.tensor([10, 700]), torch.tensor(text)).sample.numpy()
        our_hidden = our_clip(paddle.to_tensor(ids))[0].numpy()
        their_hidden = text_encoder(torch.tensor(ids))[0].numpy()
    return max(np.abs(ours - their).max(), np.abs(our_hidden - their_hidden).max())


# kohya's loader there knows these layers; those of mixed ranks only diffusers' form can tell it.
@pytest.mark.parametrize("form, of, rank", [("kohya", "att", 4), ("kohya", "resnets", 2), ("diffusers", "", None)])
def test_what_diffusers_computes_with_our_files(base, tmp_path, form, of, rank):
    weights, _ = base
    lora = small_lora(weights.components, rank=rank or (lambda shape: 2 + len(shape)), alpha=0.5, of=of)
    file = write_lora(lora, tmp_path / "lora.safetensors", form)
    networks = theirs(base, file)
    assert compute_both(weights, *networks) > 1e-3
    assert compute_both(merge_lora(weights, lora), *networks) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_our_files_through_diffusers_and_back(base, tmp_path, form, dtype):
    weights, _ = base
    lora = small_lora(weights.components, rank=4, alpha=4.0, of="att", dtype=dtype)
    unet, text_encoder = theirs(base, write_lora(lora, tmp_path / "ours.safetensors", form))
    unet, text_encoder = (one.to(getattr(torch, dtype)) for one in (unet, text_encoder))
    networks = {"unet": unet, "text_encoder": text_encoder}
    state = {
        name: get_peft_model_state_dict(one, adapter_name=next(iter(one.peft_config))) for name, one in networks.items()
    }
    as_peft = {f"{name}.{key}": value for name, own in state.items() for key, value in own.items()}
    save_file(convert_state_dict_to_kohya(as_peft), tmp_path / "kohya.safetensors")
    StableDiffusionPipeline.save_lora_weights(
        tmp_path, *(convert_state_dict_to_diffusers(state[name]) for name in ("unet", "text_encoder"))
    )
    assert differences(lora, read_lora(tmp_path)) == []
    assert differences(lora, read_lora(tmp_path / "kohya.safetensors")) == []
