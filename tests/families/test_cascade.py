"""Stable Cascade's stage C: published sizes, what is refused, that it learns, and what it is told."""

import re

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from overfit import learn, with_new_noise
from tiny_cascade import flags, make_batch
from tiny_model import write_image_encoder, write_prior

from ppldm.cache.command import precompute
from ppldm.data.inputs import Uniform
from ppldm.families.base import check_family, get_family
from ppldm.networks.build import build_network, save_component
from ppldm.networks.cascade.stages import clip_pixels, embed_pictures
from ppldm.networks.configs import read_new_config
from ppldm.training.commands.dry_run import reckon
from ppldm.training.commands.train import read_recipe
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import ConfigError, ModelError, PartError
from ppldm.utils.rng import Stream
from ppldm.weights.configs import complete_config
from ppldm.weights.fill import component_of, fill_component
from ppldm.weights.lora.files import read_lora
from ppldm.weights.lora.merge import write_adapters
from ppldm.weights.source import read_component
from ppldm.weights.write import write_component

FAMILY = get_family("cascade_prior")


def build(tiny, **changes):
    config, data, arguments = parse_arguments(flags(tiny, **changes), True, FAMILY.Config)[:3]
    check_family(config, data, arguments)
    return FAMILY.build(config, data, seed=5)


@pytest.mark.parametrize(
    "preset, count, batch",
    [
        ("cascade-c-3b", 3_589_103_632, 512),
        ("cascade-c-3b-lowres", 3_589_103_632, 1024),
        ("cascade-c-1b", 1_030_785_040, 1024),
        ("cascade-c-lora", 3_589_103_632, 256),
    ],
)
def test_presets_train_what_is_published(preset, count, batch):
    words = ["--preset", preset, "--do_train", "data.file_list=x", "model.effnet_name_or_path=owner/model"]
    found = reckon(read_recipe(words, True, None), num_devices=8)
    components = found["components"]
    # Of each of 64 blocks four square matrices, by rank 4.
    trained = 64 * 4 * 4 * (2048 + 2048) if preset == "cascade-c-lora" else count
    assert components["prior"] == {"class": "StableCascadeUNet", "parameters": count, "trained": trained}
    assert components["image_encoder"] == {
        "class": "CLIPVisionModelWithProjection", "parameters": 303_966_208, "trained": 0,
    }  # fmt: skip
    assert components["effnet"]["trained"] == components["text_encoder"]["trained"] == 0
    assert components["text_encoder"]["class"] == "CLIPTextModelWithProjection"
    assert found["samples_an_update"] == batch


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prior_config_file": None}, "nothing gives the prior: name its weights, --prior_name_or_path, or the config"),
        ({"prediction_type": "flow"}, "--prediction_type flow is not for Stable Cascade"),
        ({"resolution": 72}, "--resolution 72 must be a multiple of 32, the EfficientNet's downscaling factor"),
        ({"buckets": "64x72"}, "the sides of 64 x 72 must be multiples of 32, the EfficientNet's"),
        (
            {"prior_config_file": "cascade_c_tiny"},
            "the text_encoder gives hidden_size 32, and the prior takes clip_text",
        ),
        (
            {"latents": "ondemand", "random_crop": False, "image_encoder_name_or_path": "x"},
            "--latents ondemand leaves no pictures for the image encoder; omit --image_encoder_name_or_path",
        ),
        ({"to_static": True}, "--to_static is not supported for priors of Stable Cascade"),
        ({"lora_rank": 2, "lora_components": "text_encoder"}, "--lora_components text_encoder: of Stable Cascade only"),
        ({"lora_rank": 2, "lora_modules": "attn"}, "no linear or convolution layer of prior has a name with it"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(tiny, changes, message):
    with pytest.raises((ConfigError, ModelError), match=re.escape(message)):
        build(tiny, **changes)


def test_the_network_is_told_the_level_the_caption_and_no_picture(tiny):
    model, batch = build(tiny, loss_weighting="p2"), make_batch(4)
    batch["timesteps"] = paddle.to_tensor([0, 10, 500, 999])
    seen = {}
    inner = model.prior.forward
    model.prior.forward = lambda *given, **named: seen.update(named, given=given) or inner(*given, **named)
    loss = model(**batch)
    noisy, ratios = seen["given"]
    latents, signal = model.latents(batch["pixel_values"]), model.process.levels()[[0, 10, 500, 999]]
    np.testing.assert_allclose(signal[2], 0.49228516, rtol=1e-6)  # of the cosine schedule
    expected = signal.reshape(-1, 1, 1, 1) ** 0.5 * latents.numpy()
    expected += (1 - signal.reshape(-1, 1, 1, 1)) ** 0.5 * batch["noise"].numpy()
    np.testing.assert_allclose(noisy.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(ratios.numpy(), model.process.schedule.ratios()[[0, 10, 500, 999]], atol=1e-6)
    assert (seen["clip_img"].numpy() == 0).all() and seen["clip_img"].shape == [4, 1, 8]
    words, pooled = model.embed_captions(batch["input_ids"])
    assert (seen["clip_text"].numpy() == words.numpy()).all() and (seen["clip_text_pooled"].numpy() == pooled).all()
    # A new network predicts 0: the error is the mean square of the noise.
    errors = batch["noise"].numpy() ** 2
    np.testing.assert_allclose(loss.per_sample.numpy(), errors.mean((1, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(loss.value.item(), ((1 - signal) * errors.mean((1, 2, 3))).mean(), rtol=1e-5)


def test_frozen_networks_stay_and_pixels_are_scaled_once(tiny):
    model, batch = build(tiny), make_batch(2)
    assert {name.partition(".")[0] for name in model.trained_parameters()} == {"prior"}
    pixels = batch["pixel_values"].astype("float32") / 255
    assert (model.latents(batch["pixel_values"]).numpy() == model.effnet(pixels).numpy()).all()
    shown = model.decode(model.latents(batch["pixel_values"]))
    assert shown.shape == [2, 3, 64, 64] and float(shown.abs().max()) <= 1


def test_of_one_picture_in_ten_the_network_is_told(tiny):
    model = build(tiny, image_encoder_name_or_path=write_image_encoder(tiny))
    assert model.inputs["clip_image"] == Uniform(Stream.CLIP_IMAGE) and not model.image_encoder.training
    assert "clip_image" not in build(tiny).inputs
    batch, seen, inner = make_batch(4), {}, model.prior.forward
    batch["clip_image"] = paddle.to_tensor([0.5, 0.05, 0.1, 0.0999], "float32")
    model.prior.forward = lambda *given, **named: seen.update(named) or inner(*given, **named)
    model(**batch)
    own = embed_pictures(model.image_encoder, batch["pixel_values"]).numpy()
    told = seen["clip_img"].numpy()[:, 0]
    assert (told[[0, 2]] == 0).all() and (own != 0).any()
    np.testing.assert_allclose(told[[1, 3]], own[[1, 3]], atol=1e-6)
    assert (model.condition(batch["input_ids"])["clip_img"].numpy() == 0).all()


@pytest.mark.needs("parity")
@pytest.mark.parametrize("height, width", [(64, 96), (32, 32), (160, 64)])
def test_pictures_are_embedded_as_by_transformers(tiny, tmp_path, height, width):
    """As the published trainer does: the shorter side resized, the middle, CLIP's mean and deviation."""
    import torch
    from transformers import CLIPVisionModelWithProjection

    kind, pixels = "image_encoder", np.random.default_rng(0).integers(0, 256, (2, 3, height, width), dtype=np.uint8)
    ours = fill_component(kind, read_component(kind, write_image_encoder(tiny)))
    ours.eval()
    write_component(kind, component_of(kind, ours), tmp_path / kind, "diffusers")
    theirs = CLIPVisionModelWithProjection.from_pretrained(tmp_path / kind).eval()
    short, images = min(height, width), torch.as_tensor(pixels).float() / 255
    size = [16 * side // short for side in (height, width)]
    resized = torch.nn.functional.interpolate(images, size=size, mode="bicubic", antialias=True)
    top, left = (int(round((side - 16) / 2.0)) for side in size)
    mean, std = (torch.tensor(one).reshape(3, 1, 1) for one in (
        (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    ))  # fmt: skip
    seen = (resized[:, :, top : top + 16, left : left + 16] - mean) / std
    np.testing.assert_allclose(clip_pixels(paddle.to_tensor(pixels), 16).numpy(), seen.numpy(), atol=1e-4)
    with torch.no_grad():
        expected = theirs(seen).image_embeds.numpy()
    np.testing.assert_allclose(embed_pictures(ours, paddle.to_tensor(pixels)).numpy(), expected, atol=1e-4)
    whole = {"text_config": {"hidden_size": 512}, "vision_config": component_of(kind, ours).config}
    assert complete_config(kind, whole, "x") == component_of(kind, ours).config


def test_adapters_of_attention_and_tokens_alone_are_trained(tiny, tmp_path):
    settings = {"lora_rank": 2, "lora_alpha": 1, "train_tokens": "<dog>=picture"}
    model, batch = build(tiny, **settings), make_batch(4)
    rng = np.random.default_rng(1)
    model.prior.clf[1].weight.set_value(rng.standard_normal(model.prior.clf[1].weight.shape, dtype=np.float32))
    batch["input_ids"][:, 3] = int(model.tokenizer.encode(["<dog>"])[0][1])
    names = {name.removeprefix("prior_lora.").rpartition(".")[0] for name in model.trained_parameters()}
    kept = {"to_q", "to_k", "to_v", "to_out.0"}
    assert {name.partition(".attention.")[2] for name in names - {"text_encoder_tokens"}} == kept
    model.train()
    before = model(**batch)
    before.value.backward()
    for name, parameter in model.trained_parameters().items():
        moves = name.endswith((".up", ".change"))  # the others only once those have
        assert (float(parameter.grad.abs().sum()) > 0) == moves, name
    with paddle.no_grad():
        for parameter in model.trained_parameters().values():
            parameter.set_value(parameter - 0.05 * parameter.grad)
    assert float(model(**batch).value) < float(before.value)
    model.eval()
    condition = model.condition(batch["input_ids"])
    expected = model.denoise(batch["noise"], batch["timesteps"], **condition).numpy()
    config = parse_arguments(flags(tiny, **settings), True, FAMILY.Config)[0]
    FAMILY.export(model, config, None, tmp_path / "prior", None, {})
    merged = fill_component("cascade_prior", read_component("cascade_prior", tmp_path / "prior"))
    merged.eval()
    model.prior = merged
    found = model.denoise(batch["noise"], batch["timesteps"], **condition).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    write_adapters(model, tmp_path / "lora", None, {})
    pairs = read_lora(tmp_path / "lora").components["prior"]
    assert pairs.keys() == names - {"text_encoder_tokens"} and {pair.rank for pair in pairs.values()} == {2}


@pytest.mark.needs("parity")
def test_diffusers_loads_what_is_exported(tiny, tmp_path):
    import torch
    from diffusers.models.unets import StableCascadeUNet

    model, rng = build(tiny), np.random.default_rng(0)
    for parameter in model.prior.parameters():
        parameter.set_value(0.1 * rng.standard_normal(parameter.shape, dtype=np.float32))
    config = parse_arguments(flags(tiny), True, FAMILY.Config)[0]
    FAMILY.export(model, config, None, tmp_path / "prior", None, {})
    theirs = StableCascadeUNet.from_pretrained(tmp_path / "prior").eval()
    shapes = ((2, 16, 3, 4), (2, 1, 32), (2, 12, 32), (2, 1, 8))
    sample, *told = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    given = [sample, np.array([0.1, 0.9], np.float32), *told]
    with torch.no_grad():
        expected = theirs(*map(torch.tensor, given)).sample.numpy()
    model.eval()
    np.testing.assert_allclose(model.prior(*map(paddle.to_tensor, given)).numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.turn("a family learns eight pictures", 1)
@pytest.mark.slow
def test_eight_pictures_are_learned(tiny):
    """What is known of x_0 tells the noise: of eight pictures the error falls, by their captions too."""
    model, batch = build(tiny), make_batch(8)
    # As if the encoder were trained: an untrained one gives latents that are nearly 0.
    latents = paddle.to_tensor(np.random.default_rng(1).standard_normal((8, 16, 2, 2), dtype=np.float32))
    model.latents = lambda pixel_values: latents
    losses = learn(model, 5e-3, with_new_noise(batch, (8, 16, 2, 2), 300))
    assert np.mean(losses[:3]) > 0.8 and np.mean(losses[-30:]) < 0.6, losses[::30]


def run_on(tiny, folder, kind="loop", **changes) -> list:
    """The losses and the weights of three updates on centred crops."""
    settings = {
        "random_crop": False,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "resolution": 32,
    }
    settings |= {"prior_config_file": None, "prior_name_or_path": write_prior(tiny), "logging_steps": 1}
    settings |= {"weight_decay": 0.01, **changes}
    words = [*flags(tiny, folder, **settings, image_logging_steps=3), *(["--do_train"] if kind == "trainer" else [])]
    run = prepare(*parse_arguments(words, kind == "loop", FAMILY.Config))
    (run_loop if kind == "loop" else run_trainer)(run)
    losses = [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    return [losses, *(value.numpy() for value in run.state.model.trained_parameters().values())]


@pytest.mark.turn("a cached file changes no loss", 2)
@pytest.mark.slow
def test_on_cached_latents_losses_are_the_same_to_the_bit(tiny, tmp_path):
    """Computed ahead, or as rows are met: the EfficientNet is frozen, and has no posterior to draw from."""
    save_component(build_network("effnet", read_new_config("effnet", "effnet_tiny", ""), 5), tmp_path / "effnet")
    own = {"effnet_config_file": None, "effnet_name_or_path": tmp_path / "effnet", "num_inference_steps": 1}
    cache = {"latents_dtype": "float32", "latents_dir": tmp_path / "latents"}
    expected = run_on(tiny, tmp_path / "plain", **own)
    with pytest.raises(PartError, match="has no cached latents in"):
        run_on(tiny, tmp_path / "none", **own, **cache, latents="cached")
    made = {"dtype": "float32", "latents_dir": cache["latents_dir"], "batch_size": 4, "num_workers": 1}
    precompute([tiny.file_list], vae=str(tmp_path / "effnet"), resolutions=[32], **made)
    cached = run_on(tiny, tmp_path / "cached", **own, **cache, latents="cached")
    met = run_on(tiny, tmp_path / "met", **own, **{**cache, "latents_dir": tmp_path / "met/own"}, latents="ondemand")
    for found in (cached, met):
        assert found[0] == expected[0] and len(found[0]) == 3
        assert all(np.array_equal(one, other) for one, other in zip(found[1:], expected[1:], strict=True))
    save_component(build_network("effnet", read_new_config("effnet", "effnet_tiny", ""), 6), tmp_path / "other")
    with pytest.raises(PartError, match="was made of something else: autoencoder"):
        run_on(tiny, tmp_path / "else", **{**own, "effnet_name_or_path": tmp_path / "other"}, **cache, latents="cached")


@pytest.mark.turn("a cached file changes no loss", 2)
@pytest.mark.slow
def test_on_cached_embeddings_losses_are_the_same_to_the_bit(tiny, tmp_path):
    """Under both loops, with processes that load: the words, and the projected caption, which is narrower here."""
    config = read_new_config("projected_text_encoder", tiny.config("clip"), "") | {"max_position_embeddings": 12}
    save_component(build_network("projected_text_encoder", config | {"projection_dim": 24}, 5), tmp_path / "clip")
    prior = read_new_config("cascade_prior", tiny.config("cascade_c"), "") | {"clip_text_pooled_in_channels": 24}
    layer, rng = build_network("cascade_prior", prior, 5), np.random.default_rng(7)
    for parameter in layer.parameters():  # so that all of what it is told counts
        parameter.set_value(parameter + 0.1 * rng.standard_normal(parameter.shape, dtype=np.float32))
    save_component(layer, tmp_path / "prior")
    own = {"text_encoder_config_file": None, "text_encoder_name_or_path": tmp_path / "clip", "num_inference_steps": 1,
           "caption_drop": 0.3, "prior_name_or_path": tmp_path / "prior"}  # fmt: skip
    cache = {"text_embeddings": "cached", "text_embeddings_dtype": "float32", "latents_dir": tmp_path / "texts"}
    expected = run_on(tiny, tmp_path / "plain", **own)
    made = {"text_encoder": str(tmp_path / "clip"), "tokenizer": str(tiny.tokenizer), "model_max_length": 12,
            "text_dtype": "float32", "latents_dir": tmp_path / "texts", "batch_size": 4, "num_workers": 1}  # fmt: skip
    precompute([tiny.file_list], **made)
    with pytest.raises(PartError, match="text_projection was None and is True; make .* --text-projection`"):
        run_on(tiny, tmp_path / "none", **own, **cache)
    precompute([tiny.file_list], text_projection=True, **made)
    for kind, workers in (("loop", 0), ("trainer", 2)):
        folder = tmp_path / f"{kind}-{workers}"
        found = run_on(tiny, folder, kind, **own, **cache, dataloader_num_workers=workers)
        assert found[0] == expected[0] and len(found[0]) == 3
        assert all(np.array_equal(one, other) for one, other in zip(found[1:], expected[1:], strict=True))
    with pytest.raises(ConfigError, match="--train_tokens changes what captions are embedded as; omit"):
        run_on(tiny, tmp_path / "tokens", **own, **cache, train_tokens="<dog>=picture")
