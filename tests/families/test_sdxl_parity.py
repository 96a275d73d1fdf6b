"""Stable Diffusion XL's conditioning, loss and gradients are those of diffusers and transformers over the same batch;
its pipelines are read, trained, written and read again, single files too. Published structure, small widths.

Bars: 1e-4 of the loss, of the largest gradient and of the largest number that the text encoders give.
"""

import json
from types import SimpleNamespace

import needs
import numpy as np
import paddle
import pytest
from small_weights import VAE

needs.need("parity")

import diffusers  # noqa: E402
import torch  # noqa: E402
from diffusers.loaders.lora_conversion_utils import (  # noqa: E402
    _convert_non_diffusers_lora_to_diffusers,
    _maybe_map_sgm_blocks_to_diffusers,
)
from diffusers.loaders.single_file_utils import (  # noqa: E402
    convert_ldm_clip_checkpoint,
    convert_ldm_unet_checkpoint,
    convert_open_clip_checkpoint,
)
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

import ppldm  # noqa: E402
from ppldm.config.network_files import vocabulary_folder  # noqa: E402
from ppldm.families.ldm_build import weights_of  # noqa: E402
from ppldm.families.sdxl import SDXL, SDXLConfig  # noqa: E402
from ppldm.networks.configs import read_new_config  # noqa: E402
from ppldm.utils.errors import ModelError  # noqa: E402
from ppldm.weights.components import turn_linear  # noqa: E402
from ppldm.weights.fill import parameter_shapes  # noqa: E402
from ppldm.weights.lora.files import Lora, LoraPair, read_lora, write_lora  # noqa: E402
from ppldm.weights.source import open_model, read_component  # noqa: E402
from ppldm.weights.write import write_weights  # noqa: E402

BAR = 1e-4
UNET = {
    **{"sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 2, "norm_num_groups": 32},
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    **{"block_out_channels": [32, 64, 128], "transformer_layers_per_block": [1, 2, 3], "attention_head_dim": [1, 1, 2]},
    **{"cross_attention_dim": 80, "use_linear_projection": True, "addition_embed_type": "text_time"},
    **{"addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 40 + 6 * 256},
}
VAE_XL = VAE | {"scaling_factor": 0.13025, "sample_size": 128}
# How the published model is sampled.
SAMPLING = {
    **{"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1},
    "timestep_spacing": "leading",
}
IDS = ("bos_token_id", "eos_token_id")  # of a text encoder, which nothing here reads
CAPTIONS = ["a red heart", "", " ".join(["two blue boats on a calm lake in the evening"] * 9)]
SIZES = [[512, 768, 0, 40, 128, 128], [100, 60, 7, 0, 128, 128], [2048, 1024, 31, 64, 128, 96]]


def clip(kind, width: int, act: str, projection: int):
    sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 1}
    sizes |= {"projection_dim": projection, "eos_token_id": 49407, "bos_token_id": 49406}
    return randomised(kind(CLIPTextConfig(vocab_size=49408, hidden_act=act, **sizes))).eval()


@torch.no_grad()
def randomised(network):
    """Nothing at its initial zero or one."""
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_((0.1 * torch.randn_like(parameter)) + ("norm" in name and name.endswith("weight")))
    return network


@pytest.fixture(scope="module", params=[True, False], ids=["zeros", "embedding"])
def pipeline(request, tmp_path_factory):
    """By what it is told of an empty caption."""
    torch.manual_seed(1)
    pipeline = diffusers.StableDiffusionXLPipeline(
        unet=randomised(diffusers.UNet2DConditionModel(**UNET)),
        scheduler=diffusers.EulerDiscreteScheduler(**SAMPLING),
        vae=diffusers.AutoencoderKL(**VAE_XL).eval(),
        text_encoder=clip(CLIPTextModel, 32, "quick_gelu", 32),
        text_encoder_2=clip(CLIPTextModelWithProjection, 48, "gelu", 40),
        tokenizer=CLIPTokenizer.from_pretrained(vocabulary_folder("clip")),
        tokenizer_2=CLIPTokenizer.from_pretrained(vocabulary_folder("open-clip")),
        force_zeros_for_empty_prompt=request.param,
    )
    folder = tmp_path_factory.mktemp("sdxl") / "pipeline"
    pipeline.save_pretrained(folder)
    return SimpleNamespace(folder=folder, theirs=pipeline, zeros=request.param)


def build(source, **changes):
    settings = SDXLConfig(model_name_or_path=str(source), **changes)
    return SDXL().build(settings, SimpleNamespace(resolution=128, buckets="off"), seed=0)


@pytest.fixture(scope="module")
def model(pipeline):
    return build(pipeline.folder)


def assert_near(ours, theirs):
    ours, theirs = np.asarray(ours), theirs.detach().numpy()
    assert ours.shape == theirs.shape and np.abs(ours - theirs).max() <= BAR * np.abs(theirs).max()


def assert_same(one, other):
    assert one.components.keys() == other.components.keys()
    for name, before in one.components.items():
        again = other.components[name]
        assert again.config == before.config and again.arrays.keys() == before.arrays.keys(), name
        assert all((again.arrays[key] == value).all() for key, value in before.arrays.items()), name


def encode_prompt(pipeline, captions):
    """Hidden states and pooled, of an empty caption those of the pipeline's negative prompt that is not given."""
    told = pipeline.theirs.encode_prompt(captions, device="cpu", do_classifier_free_guidance=True)
    hidden, without, pooled, pooled_without = told
    for number in (number for number, caption in enumerate(captions) if not caption):
        hidden[number], pooled[number] = without[number], pooled_without[number]
    return hidden, pooled


@torch.no_grad()
def test_captions_are_told_as_by_the_pipeline(pipeline, model):
    hidden, pooled = encode_prompt(pipeline, CAPTIONS)
    told = model.condition(paddle.to_tensor(model.tokenizer.encode(CAPTIONS)))
    assert told.keys() == {"encoder_hidden_states", "pooled"} and hidden.shape == (3, 77, 80)
    assert_near(told["encoder_hidden_states"], hidden)
    assert_near(told["pooled"], pooled)
    assert (np.abs(told["pooled"].numpy()).max(1) == 0).tolist() == [False, pipeline.zeros, False]


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients(pipeline, model, recompute):
    theirs, rng = pipeline.theirs, np.random.default_rng(2)
    batch = {
        "pixel_values": rng.integers(0, 256, (3, 3, 128, 128), dtype=np.uint8),
        "input_ids": model.tokenizer.encode(CAPTIONS),
        "timesteps": np.array([3, 500, 998]),
        "noise": rng.standard_normal((3, 4, 16, 16), dtype=np.float32),
        "posterior_noise": rng.standard_normal((3, 4, 16, 16), dtype=np.float32),
        "sizes": np.array(SIZES),
    }
    given = {name: torch.tensor(value) for name, value in batch.items()}
    with torch.no_grad():
        posterior = theirs.vae.encode(given["pixel_values"].float() / 127.5 - 1).latent_dist
        latents = (posterior.mean + posterior.std * given["posterior_noise"]) * theirs.vae.config.scaling_factor
        hidden, pooled = encode_prompt(pipeline, CAPTIONS)
    # As diffusers' train_text_to_image_sdxl.py has it.
    noisy = diffusers.DDPMScheduler(**SAMPLING).add_noise(latents, given["noise"], given["timesteps"])
    told = {"text_embeds": pooled, "time_ids": given["sizes"].float()}
    theirs.unet.zero_grad()
    predicted = theirs.unet(noisy, given["timesteps"], hidden, added_cond_kwargs=told).sample
    expected = torch.nn.functional.mse_loss(predicted, given["noise"])
    expected.backward()
    model.train()
    model.clear_gradients()
    model.unet.enable_gradient_checkpointing() if recompute else model.unet.disable_gradient_checkpointing()
    loss = model(**{name: paddle.to_tensor(value) for name, value in batch.items()}).value
    loss.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=BAR)
    known = {f"unet.{name}": one.grad.numpy() for name, one in theirs.unet.named_parameters()}
    gradients = turn_linear({name: one.grad.numpy() for name, one in model.trained_parameters().items()})
    largest = max(np.abs(value).max() for value in known.values())
    assert gradients.keys() == known.keys()
    for name, gradient in gradients.items():
        assert np.abs(gradient - known[name]).max() <= BAR * largest, name


def test_a_pipeline_goes_in_and_out_to_the_bit(pipeline, model, tmp_path):
    read = open_model(pipeline.folder).read()
    model.eval()
    built = weights_of(model)
    assert_same(read, built)
    built.metadata |= {"empty_caption": read.metadata["empty_caption"]}
    for form in ("ppdiffusers", "diffusers"):
        write_weights(built, form, tmp_path / form)
        again = open_model(tmp_path / form).read()
        assert_same(read, again)
        assert again.metadata["empty_caption"] == ("zeros" if pipeline.zeros else "embedding")
    theirs = diffusers.StableDiffusionXLPipeline.from_pretrained(tmp_path / "diffusers")
    for name in ("unet", "text_encoder", "text_encoder_2", "vae"):
        known, again = getattr(pipeline.theirs, name).state_dict(), getattr(theirs, name).state_dict()
        assert known.keys() == again.keys() and all((again[key] == value).all() for key, value in known.items())
    assert theirs.tokenizer_2.pad_token == "!"
    index, own = (
        json.loads((folder / "model_index.json").read_text()) for folder in (tmp_path / "diffusers", pipeline.folder)
    )
    others = {"_diffusers_version": "", "_name_or_path": "", "scheduler": ""}
    assert index | others == own | others
    card = (tmp_path / "diffusers/README.md").read_text()
    assert 'StableDiffusionXLPipeline.from_pretrained(".")' in card


def test_a_single_file_goes_in_and_out_to_the_bit(pipeline, model, tmp_path):
    read = open_model(pipeline.folder).read()
    model.eval()
    built = weights_of(model)
    built.metadata |= {"empty_caption": read.metadata["empty_caption"]}
    write_weights(built, "compvis", tmp_path / "out")
    again = open_model(tmp_path / "out/model.safetensors").read()
    assert_same(read, again)
    assert again.metadata["empty_caption"] == read.metadata["empty_caption"]
    stored = load_file(tmp_path / "out/model.safetensors")
    theirs = pipeline.theirs
    found = {
        "unet": convert_ldm_unet_checkpoint(dict(stored), dict(theirs.unet.config)),
        "text_encoder": convert_ldm_clip_checkpoint(dict(stored), remove_prefix="conditioner.embedders.0.transformer."),
        "text_encoder_2": convert_open_clip_checkpoint(
            theirs.text_encoder_2, dict(stored), "conditioner.embedders.1.model."
        ),
    }
    for name, converted in found.items():
        known = getattr(theirs, name).state_dict()
        converted = {key: one for key, one in converted.items() if "position_ids" not in key}
        assert converted.keys() == known.keys(), name
        assert all((converted[key] == value).all() for key, value in known.items()), name
    # As published: shapes say what it is.
    stored["conditioner.embedders.1.model.logit_scale"] = torch.tensor(4.6)
    stored["conditioner.embedders.0.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(stored, tmp_path / "sdxl.safetensors")
    found = open_model(tmp_path / "sdxl.safetensors").read()
    for name, before in read.components.items():
        sizes = {"unet": {"sample_size": 128}, "vae": {"sample_size": 512}}.get(name, {})
        own = {
            key: value
            for key, value in found.components[name].config.items()
            if key not in ("eos_token_id", "bos_token_id")
        }
        assert own == {key: value for key, value in (before.config | sizes).items() if key in own}, name
        arrays = found.components[name].arrays
        assert arrays.keys() == before.arrays.keys() and all(
            (arrays[key] == one).all() for key, one in before.arrays.items()
        )
    assert found.scheduler["prediction_type"] == "epsilon"
    trained = build(tmp_path / "sdxl.safetensors")
    assert (trained.tokenizer.encode(CAPTIONS) == model.tokenizer.encode(CAPTIONS)).all() and trained.empty_end
    for name in ("unet", "text_encoder_2"):
        one = read_component(name, tmp_path / "sdxl.safetensors")
        assert all((one.arrays[key] == value).all() for key, value in read.components[name].arrays.items())
    assert (
        open_model(tmp_path / "sdxl.safetensors", prediction_type="v_prediction").read().scheduler["prediction_type"]
        == "v_prediction"
    )
    refiner = {
        key.replace("embedders.1", "embedders.0"): one for key, one in stored.items() if "embedders.0" not in key
    }
    save_file(refiner, tmp_path / "refiner.safetensors")
    with pytest.raises(ModelError, match="a refiner of Stable Diffusion XL, which is not supported"):
        open_model(tmp_path / "refiner.safetensors").read()


def test_the_published_sizes():
    counts = {"unet": ("unet_sdxl", 2_567_463_684), "text_encoder": ("clip_vit_l", 123_060_480)}
    counts |= {"text_encoder_2": ("clip_vit_bigg", 694_659_840)}
    for kind, (file, count) in counts.items():
        config = read_new_config(kind, file, "")
        assert sum(int(np.prod(shape)) for shape in parameter_shapes(kind, config).values()) == count
    with torch.device("meta"):
        theirs = diffusers.UNet2DConditionModel.from_config(read_new_config("unet", "unet_sdxl", ""))
    assert sum(one.numel() for one in theirs.parameters()) == counts["unet"][1]


@torch.no_grad()
@pytest.mark.parametrize("negative", [None, "blue boats"])
def test_what_is_drawn_is_what_the_pipeline_draws(pipeline, negative):
    """Guidance by both conditions, and sizes: as large as it is, not cropped. Latents of the same noise."""
    ours, noise = ppldm.load(pipeline.folder), np.random.default_rng(4).standard_normal((1, 1, 4, 16, 12), np.float32)
    how = {"num_inference_steps": 4, "guidance_scale": 5.0, "height": 128, "width": 96}
    given = {"prompt": "a red heart", "negative_prompt": negative}
    theirs = pipeline.theirs(**given, **how, latents=torch.tensor(noise[0]), output_type="latent").images
    found = ours.generate(**given, **how, latents=noise, sampler="euler", output="latents")
    assert_near(found[0], theirs)
    assert ours.model.latent_map.scale == 0.13025


def published_layers(shapes: dict) -> list[str]:
    """Layers of attention of the published UNet, one of each block and depth at least."""
    return [name.removesuffix(".weight") for name in shapes if ".attn" in name and name.endswith("to_q.weight")]


def test_kohyas_keys_are_those_of_the_published_numbers(tmp_path):
    """By diffusers' own converter; read again they are the same."""
    rng = np.random.default_rng(0)

    def pair():
        return LoraPair(*(rng.standard_normal(shape, np.float32) for shape in ((2, 6), (4, 2))), 2.0)

    config = read_new_config("unet", "unet_sdxl", "")
    layers = published_layers(parameter_shapes("unet", config))
    text = "text_model.encoder.layers.0.self_attn.q_proj"
    lora = Lora(
        {"unet": {name: pair() for name in layers}, "text_encoder": {text: pair()}, "text_encoder_2": {text: pair()}}
    )
    file = write_lora(lora, tmp_path / "kohya.safetensors", "kohya")
    stored = load_file(file)
    starts = {key.split("_text_model")[0] if "_te" in key[:8] else "_".join(key.split("_")[:3]) for key in stored}
    assert starts == {"lora_te1", "lora_te2", "lora_unet_input", "lora_unet_middle", "lora_unet_output"}
    mapped = _maybe_map_sgm_blocks_to_diffusers(dict(stored), SimpleNamespace(layers_per_block=2))
    converted, _ = _convert_non_diffusers_lora_to_diffusers(mapped)
    for form in ("kohya", "diffusers"):
        again = read_lora(write_lora(lora, tmp_path / f"{form}.safetensors", form))
        assert again.components.keys() == lora.components.keys()
        for name, own in lora.components.items():
            assert again.components[name].keys() == own.keys()
            assert all((again.components[name][key].down == one.down).all() for key, one in own.items())
    for name in layers:
        assert any((one == torch.tensor(lora.components["unet"][name].down)).all() for key, one in converted.items()
                   if key.startswith(f"unet.{name.replace('.to_q', '')}") and one.shape == (2, 6)), name  # fmt: skip
