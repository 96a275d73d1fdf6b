"""Training low-rank adapters and tokens as diffusers with peft does: loss and gradients of a step, to 1e-4.

Structure of Stable Diffusion (a CLIP text encoder, cross-attention in every block) at a small width, random weights."""

import needs
import numpy as np
import paddle
import pytest
from ppdiffusers.models.attention_processor import AttnProcessor
from small_weights import small_weights, write_clip

needs.need("parity")

import diffusers  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
from transformers import CLIPTextModel, CLIPTokenizer  # noqa: E402

from ppldm.data.text.tokenizer import ClipTokenizer  # noqa: E402
from ppldm.diffusion.process import Process  # noqa: E402
from ppldm.families.ldm import LdmConfig  # noqa: E402
from ppldm.networks.adapters import adapt  # noqa: E402
from ppldm.networks.latent_diffusion import LatentDiffusionModel  # noqa: E402
from ppldm.weights.configs import PUBLISHED_SCHEDULE  # noqa: E402
from ppldm.weights.fill import fill_component  # noqa: E402
from ppldm.weights.lora.merge import (  # noqa: E402
    lora_of,
    read_tokens,  # noqa: E402
    tokens_of,
    write_adapters,
)
from ppldm.weights.source import read_component  # noqa: E402
from ppldm.weights.write import write_weights  # noqa: E402

BAR = 1e-4
TOKEN, RANK, ALPHA = "<fido>", 4, 2.0
ASKED = {
    "lora_rank": RANK, "lora_alpha": ALPHA, "lora_modules": ["attn", "conv1"],
    "lora_components": ["unet", "text_encoder"], "train_tokens": [f"{TOKEN}=^red"],
}  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Our model and the parts of diffusers', each adapted by its own code, with equal weights."""
    folder = tmp_path_factory.mktemp("parity")
    # Groups of a few values have hardly any variance to be divided by: float32 is 1e-2 off float64 then.
    weights = small_weights(4, unet={"norm_num_groups": 8})
    clip = write_clip(folder / "clip", 5)
    weights.components["text_encoder"] = read_component("text_encoder", clip)
    weights.tokenizer = clip.parent / "tokenizer"
    write_weights(weights, "diffusers", folder / "d")
    with paddle.utils.unique_name.guard():
        parts = {kind: fill_component(kind, weights.components[kind]) for kind in ("vae", "text_encoder", "unet")}
        parts["unet"].set_attn_processor(AttnProcessor())
        ours = LatentDiffusionModel(Process.of(weights.scheduler), **parts)
    ours.tokenizer = ClipTokenizer(clip.parent / "tokenizer", 77)
    adapt(ours, LdmConfig(**ASKED), seed=3)
    rng = np.random.default_rng(6)
    for parameter in ours.trained_parameters().values():
        parameter.set_value(parameter + rng.normal(0, 0.05, parameter.shape).astype(np.float32))
    return ours, *_theirs(folder / "d", ours)


def _theirs(folder, ours):
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    text_encoder = CLIPTextModel.from_pretrained(folder / "text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    assert tokenizer.add_tokens(TOKEN) == 1
    text_encoder.resize_token_embeddings(len(tokenizer))
    table = text_encoder.get_input_embeddings().weight
    with torch.no_grad():
        table[-1] = torch.tensor(tokens_of(ours)[1][0])
    for name, network in (("unet", unet), ("text_encoder", text_encoder)):
        network.requires_grad_(False)
        pairs = lora_of(ours).components[name]
        network.add_adapter(
            peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[*pairs], init_lora_weights="gaussian")
        )
        modules = dict(network.named_modules())
        for layer, pair in pairs.items():
            with torch.no_grad():
                modules[layer].lora_A["default"].weight.copy_(torch.tensor(pair.down))
                modules[layer].lora_B["default"].weight.copy_(torch.tensor(pair.up))
    table.requires_grad_(True)
    return diffusers.AutoencoderKL.from_pretrained(folder / "vae"), unet, text_encoder, tokenizer


def gap(ours, theirs) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def test_loss_and_gradients_of_a_step(both):
    ours, _, unet, text_encoder, tokenizer = both
    rng, captions = np.random.default_rng(1), ["a red <fido>", "blue<fido> 12"]
    latents, noise = (rng.standard_normal((2, 4, 16, 16), np.float32) for _ in range(2))
    ids, timesteps = ours.tokenizer.encode(captions), np.array([100, 700])
    their_ids = tokenizer(captions, padding="max_length", max_length=77, truncation=True).input_ids
    assert ids.tolist() == their_ids

    moments = np.stack([latents / ours.latent_map.scale, np.zeros_like(latents)], axis=1)
    given = {"input_ids": ids, "timesteps": timesteps, "noise": noise, "posterior_noise": noise, "moments": moments}
    ours.train()
    loss = ours(**{name: paddle.to_tensor(value) for name, value in given.items()}).value
    loss.backward()

    schedule = {key: PUBLISHED_SCHEDULE[key] for key in ("beta_start", "beta_end", "beta_schedule")}
    scheduler = diffusers.DDPMScheduler(**schedule)
    noisy = scheduler.add_noise(torch.tensor(latents), torch.tensor(noise), torch.tensor(timesteps))
    states = text_encoder(torch.tensor(ids))[0]

    predicted = unet(noisy, torch.tensor(timesteps), states).sample
    their_loss = torch.nn.functional.mse_loss(predicted, torch.tensor(noise))
    their_loss.backward()

    assert abs(float(loss) - their_loss.item()) <= BAR * their_loss.item()
    for name, network in (("unet", unet), ("text_encoder", text_encoder)):
        modules = dict(network.named_modules())
        for layer, own in ours.adapters[f"{name}_lora"].layers.items():
            for array, theirs in (("down", modules[layer].lora_A), ("up", modules[layer].lora_B)):
                found, expected = getattr(own, array).grad.numpy(), theirs["default"].weight.grad.numpy()
                found = found.T if found.ndim == 2 else found
                assert np.abs(found - expected).max() <= BAR * max(np.abs(expected).max(), 1e-3), (name, layer, array)
    row = text_encoder.get_input_embeddings().weight.grad[-1].numpy()
    assert gap(ours.adapters["text_encoder_tokens"].change.grad.numpy()[0], row) <= BAR


def test_the_files_load_in_diffusers(both, tmp_path):
    """`load_lora_weights` and `load_textual_inversion` of a plain pipeline, and the folder's tokenizer."""
    ours, vae, unet, text_encoder, _ = both
    write_adapters(ours, tmp_path / "lora", None, {"ppldm": "0"})
    clean = diffusers.UNet2DConditionModel.from_config(unet.config)
    clean.load_state_dict({k.replace(".base_layer", ""): v for k, v in unet.state_dict().items() if "lora_" not in k})
    own = read_tokens(tmp_path / "lora" / "learned_embeds.safetensors")
    assert list(own) == [TOKEN] and (own[TOKEN] == tokens_of(ours)[1][0]).all()
    base = CLIPTextModel(text_encoder.config)
    base.resize_token_embeddings(520)
    base.load_state_dict(
        {k.replace(".base_layer", ""): v[:520] if "token_embedding" in k else v
         for k, v in text_encoder.state_dict().items() if "lora_" not in k}
    )  # fmt: skip
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae, unet=clean, text_encoder=base, scheduler=diffusers.DDIMScheduler(), safety_checker=None,
        tokenizer=CLIPTokenizer.from_pretrained(ours.tokenizer.folder), feature_extractor=None,
    )  # fmt: skip
    pipe.load_lora_weights(str(tmp_path / "lora"))
    pipe.load_textual_inversion(str(tmp_path / "lora"))
    ids = ours.tokenizer.encode(["a <fido> red"])
    for tokenizer in (pipe.tokenizer, CLIPTokenizer.from_pretrained(tmp_path / "lora/tokenizer")):
        assert tokenizer(["a <fido> red"], padding="max_length", max_length=77).input_ids == ids.tolist()
    ours.eval()
    states = pipe.text_encoder(torch.tensor(ids))[0].detach()
    assert gap(ours.encode_text(paddle.to_tensor(ids)).numpy(), states.numpy()) <= BAR
    x = np.random.default_rng(9).standard_normal((1, 4, 8, 8), np.float32)
    theirs = pipe.unet(torch.tensor(x), 300, states).sample.detach().numpy()
    assert gap(ours.unet(paddle.to_tensor(x), 300, paddle.to_tensor(states.numpy())).sample.numpy(), theirs) <= BAR
