"""Stable Diffusion 3's conditioning, loss and gradients are those of diffusers and transformers over the same batch;
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
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, decoders, pre_tokenizers  # noqa: E402
from tokenizers.models import Unigram  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402
from transformers import (  # noqa: E402
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

import ppldm  # noqa: E402
from ppldm.config.network_files import vocabulary_folder  # noqa: E402
from ppldm.families.ldm_build import weights_of  # noqa: E402
from ppldm.families.sd3 import SD3, SD3Config  # noqa: E402
from ppldm.networks.configs import read_new_config  # noqa: E402
from ppldm.weights.components import turn_linear  # noqa: E402
from ppldm.weights.fill import parameter_shapes  # noqa: E402
from ppldm.weights.source import open_model, read_component  # noqa: E402
from ppldm.weights.write import write_weights  # noqa: E402

BAR = 1e-4
TRANSFORMER = {
    **{"sample_size": 16, "in_channels": 16, "out_channels": 16, "patch_size": 2, "num_layers": 3},
    **{"num_attention_heads": 2, "attention_head_dim": 64, "joint_attention_dim": 96, "caption_projection_dim": 128},
    **{"pooled_projection_dim": 80, "pos_embed_max_size": 12},
}
VAE_3 = VAE | {"latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609, "use_quant_conv": False,
               "use_post_quant_conv": False, "sample_size": 512}  # fmt: skip
CAPTIONS = ["a red heart", "", " ".join(["two blue boats on a calm lake in the evening"] * 9)]


def clip(width: int, act: str):
    sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 1}
    sizes |= {"projection_dim": width, "eos_token_id": 49407, "bos_token_id": 49406}
    network = CLIPTextModelWithProjection(CLIPTextConfig(vocab_size=49408, hidden_act=act, **sizes))
    return randomised(network).eval()


@torch.no_grad()
def randomised(network):
    """Nothing at its initial zero."""
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_((0.1 * torch.randn_like(parameter)) + ("norm" in name and name.endswith("weight")))
    return network


def t5_tokenizer() -> T5TokenizerFast:
    """Of the captions' words, and letters."""
    special = ["<pad>", "</s>", "<unk>"]
    words = sorted({f"▁{word}" for caption in CAPTIONS for word in caption.split()})
    pieces = [(one, 0.0) for one in special] + [(one, -2.0) for one in words]
    pieces += [(one, -8.0) for one in ("▁", *"abcdefghijklmnopqrstuvwxyz")]
    tokenizer = Tokenizer(Unigram(pieces, 2, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    tokenizer.decoder = decoders.Metaspace("▁", "always")
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = TemplateProcessing(single=["$A", "</s>"], special_tokens=[("</s>", 1)])
    return T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0)


@pytest.fixture(scope="module", params=[False, True], ids=["two", "three"])
def pipeline(request, tmp_path_factory):
    """Without and with a T5."""
    torch.manual_seed(1)
    tokenizer = t5_tokenizer() if request.param else None
    sizes = {"d_model": 96, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"}
    t5 = request.param and T5EncoderModel(T5Config(vocab_size=len(tokenizer), **sizes)).eval()
    transformer = diffusers.SD3Transformer2DModel(**TRANSFORMER)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=diffusers.AutoencoderKL(**VAE_3).eval(),
        text_encoder=clip(32, "quick_gelu"),
        text_encoder_2=clip(48, "gelu"),
        text_encoder_3=t5 or None,
        tokenizer=CLIPTokenizer.from_pretrained(vocabulary_folder("clip")),
        tokenizer_2=CLIPTokenizer.from_pretrained(vocabulary_folder("open-clip")),
        tokenizer_3=tokenizer,
    )
    folder = tmp_path_factory.mktemp("sd3") / "pipeline"
    pipeline.save_pretrained(folder)
    return SimpleNamespace(folder=folder, theirs=pipeline)


def build(source, **changes):
    settings = SD3Config(model_name_or_path=str(source), **changes)
    return SD3().build(settings, SimpleNamespace(resolution=128, buckets="off"), seed=0)


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


def encode_prompt(theirs, captions):
    hidden, _, pooled, _ = theirs.encode_prompt(captions, None, None, "cpu", do_classifier_free_guidance=False)
    return hidden, pooled


@torch.no_grad()
def test_captions_are_told_as_by_the_pipeline(pipeline, model):
    hidden, pooled = encode_prompt(pipeline.theirs, CAPTIONS)
    told = model.condition(paddle.to_tensor(model.tokenizer.encode(CAPTIONS)))
    assert told.keys() == {"hidden", "pooled"} and hidden.shape == (
        3,
        77 + (256 if pipeline.theirs.text_encoder_3 else 77),
        96,
    )
    assert_near(told["hidden"], hidden)
    assert_near(told["pooled"], pooled)


@torch.no_grad()
def test_a_clip_that_is_missing_is_zeros(pipeline):
    hidden, pooled = encode_prompt(pipeline.theirs, CAPTIONS)
    model = build(pipeline.folder, omitted_text_encoders=["text_encoder"])
    told = model.condition(paddle.to_tensor(model.tokenizer.encode(CAPTIONS)))
    hidden[:, :77, :32] = 0
    pooled[:, :32] = 0
    assert_near(told["hidden"], hidden)
    assert_near(told["pooled"], pooled)


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients(pipeline, model, recompute):
    theirs, rng = pipeline.theirs, np.random.default_rng(2)
    batch = {
        "pixel_values": rng.integers(0, 256, (3, 3, 128, 128), dtype=np.uint8),
        "input_ids": model.tokenizer.encode(CAPTIONS),
        "timesteps": np.array([3, 500, 998]),
        "noise": rng.standard_normal((3, 16, 16, 16), dtype=np.float32),
        "posterior_noise": rng.standard_normal((3, 16, 16, 16), dtype=np.float32),
    }
    given = {name: torch.tensor(value) for name, value in batch.items()}
    with torch.no_grad():
        posterior = theirs.vae.encode(given["pixel_values"].float() / 127.5 - 1).latent_dist
        latents = posterior.mean + posterior.std * given["posterior_noise"]
        latents = (latents - theirs.vae.config.shift_factor) * theirs.vae.config.scaling_factor
        hidden, pooled = encode_prompt(theirs, CAPTIONS)
    # As diffusers' train_dreambooth_lora_sd3.py has it: sigmas of the shifted schedule, and what they are told as.
    scheduler = type(theirs.scheduler).from_config(theirs.scheduler.config)  # drawing leaves its own steps in theirs
    sigmas = scheduler.sigmas.flip(0)[given["timesteps"]]
    times = scheduler.timesteps.flip(0)[given["timesteps"]]
    mixed = sigmas[:, None, None, None]
    noisy = (1 - mixed) * latents + mixed * given["noise"]
    theirs.transformer.zero_grad()
    predicted = theirs.transformer(noisy, hidden, pooled, times, return_dict=False)[0]
    expected = torch.nn.functional.mse_loss(predicted, given["noise"] - latents)
    expected.backward()
    model.train()
    model.clear_gradients()
    model.transformer.gradient_checkpointing = recompute
    loss = model(**{name: paddle.to_tensor(value) for name, value in batch.items()}).value
    loss.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=BAR)
    known = {f"transformer.{name}": one.grad.numpy() for name, one in theirs.transformer.named_parameters()}
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
    for form in ("ppdiffusers", "diffusers"):
        write_weights(built, form, tmp_path / form)
        assert_same(read, open_model(tmp_path / form).read())
    third = hasattr(model, "text_encoder_3")
    without = {} if third else {"text_encoder_3": None, "tokenizer_3": None}
    theirs = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "diffusers", **without)
    for name in ("transformer", "text_encoder", "text_encoder_2", "vae", *["text_encoder_3"] * third):
        known = getattr(pipeline.theirs, name).state_dict()
        again = getattr(theirs, name).state_dict()
        assert known.keys() == again.keys() and all((again[key] == value).all() for key, value in known.items())
    assert theirs.scheduler.config.shift == 3.0 and theirs.tokenizer_2.pad_token == "!"
    index = json.loads((tmp_path / "diffusers/model_index.json").read_text())
    own = json.loads((pipeline.folder / "model_index.json").read_text())
    assert index | {"_diffusers_version": "", "_name_or_path": ""} == own | {
        "_diffusers_version": "",
        "_name_or_path": "",
    }
    assert ("text_encoder_3=None" in (tmp_path / "diffusers/README.md").read_text()) != third
    if third:
        told = {"padding": "max_length", "max_length": 256, "truncation": True}
        ids = theirs.tokenizer_3(CAPTIONS, **told).input_ids
        assert (np.array(ids) == model.tokenizer.of["text_encoder_3"].encode(CAPTIONS)).all()


def test_a_single_file_goes_in_and_out_to_the_bit(pipeline, model, tmp_path):
    read = open_model(pipeline.folder).read()
    model.eval()
    write_weights(weights_of(model), "compvis", tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    own = {key: value for key, value in stored.items() if key.startswith("model.diffusion_model.")}
    converted = convert_sd3_transformer_checkpoint_to_diffusers(dict(own))
    known = pipeline.theirs.transformer.state_dict()
    assert converted.keys() == known.keys() and all((converted[key] == value).all() for key, value in known.items())
    again = open_model(tmp_path / "out/model.safetensors").read()
    assert_same(read, again)
    assert_same(read, open_model(tmp_path / "out").read())
    said = json.loads((tmp_path / "out/ppldm.json").read_text())
    assert again.metadata == {key: value for key, value in said.items() if key != "files"} != {}
    # As published: shapes say what it is, and its ViT-L has no projection.
    own = {key: value for key, value in stored.items() if "clip_l.transformer.text_projection" not in key}
    save_file(own, tmp_path / "sd3.safetensors")
    found = open_model(tmp_path / "sd3.safetensors").read()
    read.components.pop("text_encoder_3", None)  # of which a published file has no tokenizer
    assert found.components.keys() == read.components.keys()
    for name, before in read.components.items():
        sizes = {"sample_size": 128} if name == "transformer" else {}
        assert found.components[name].config == before.config | sizes, name
    assert (found.components["text_encoder"].arrays["text_projection.weight"] == np.eye(32)).all()
    assert found.scheduler["timestep_shift"] == 3.0 and found.scheduler["prediction_type"] == "flow"
    again = build(tmp_path / "sd3.safetensors")
    assert (again.tokenizer.encode(CAPTIONS) == model.tokenizer.encode(CAPTIONS)[:, :154]).all()
    one = read_component("transformer", tmp_path / "sd3.safetensors")
    assert all((one.arrays[key] == value).all() for key, value in read.components["transformer"].arrays.items())


def test_the_published_size():
    config = read_new_config("transformer", "sd3_medium", "")
    count = sum(int(np.prod(shape)) for shape in parameter_shapes("transformer", config).values())
    with torch.device("meta"):
        theirs = diffusers.SD3Transformer2DModel(**config)
    assert count == sum(one.numel() for one in theirs.parameters()) == 2_028_328_000


@torch.no_grad()
def test_what_is_drawn_is_what_the_pipeline_draws(pipeline):
    """Guidance, a negative prompt, and the sampler's levels with their shift: latents of the same noise."""
    ours, noise = ppldm.load(pipeline.folder), np.random.default_rng(4).standard_normal((1, 1, 16, 16, 16), np.float32)
    how = {"num_inference_steps": 4, "guidance_scale": 5.0, "height": 128, "width": 128}
    given = {"prompt": "a red heart", "negative_prompt": "blue boats"}
    theirs = pipeline.theirs(**given, **how, latents=torch.tensor(noise[0]), output_type="latent").images
    vae = pipeline.theirs.vae.config
    found = ours.generate(**given, **how, latents=noise, output="latents")
    assert_near(found[0], theirs)
    assert ours.model.latent_map.shift == vae.shift_factor and ours.model.latent_map.scale == vae.scaling_factor
