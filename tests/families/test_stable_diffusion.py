"""Stable Diffusion: where its components come from, what is refused, and that it learns."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from overfit import overfit
from small_weights import CLIP, small_weights, write_clip
from tiny_model import load_pipeline

from ppldm.config.data import DataOptions
from ppldm.config.recipe import idle_settings
from ppldm.families.ldm import StableDiffusion, StableDiffusionConfig
from ppldm.networks.build import build_network
from ppldm.networks.configs import read_new_config
from ppldm.training.commands.train import read_recipe
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.source import read_component
from ppldm.weights.write import write_weights

DATA = DataOptions(resolution=64)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> list[str]:
    """Two pipelines of Stable Diffusion that differ in all weights."""
    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("sd")
        clip = write_clip(folder / "clip", seed)
        weights = small_weights(seed)
        weights.components["text_encoder"] = read_component("text_encoder", clip)
        weights.tokenizer = clip.parent / "tokenizer"
        write_weights(weights, "diffusers", folder / "pipeline")
        folders.append(str(folder / "pipeline"))
    return folders


def source_of(model, pipelines) -> dict:
    """Component to the number of the pipeline that it has its weights of; None for neither."""
    found = {}
    known = [load_pipeline(folder) for folder in pipelines]
    for name, component in model.components.items():
        own = component.layer.state_dict()
        alike = [number for number, one in enumerate(known)
                 if all((own[key].numpy() == value.numpy()).all()
                        for key, value in one.components[name].layer.state_dict().items())]  # fmt: skip
        found[name] = next(iter(alike), None)
    return found


def test_components_come_from_the_first_source_that_is_given(pipelines, tmp_path):
    """A whole pipeline, then weights of one component, then its config."""
    first, second = pipelines
    network = tmp_path / "unet.json"
    network.write_text(json.dumps(dict(load_pipeline(first).unet.config), default=str))
    clip = tmp_path / "clip.json"
    clip.write_text(json.dumps(CLIP))
    cases = [
        ({"model_name_or_path": first, "unet_name_or_path": second, "unet_config_file": "unet_sd1"}, (0, 0, 0)),
        ({"vae_name_or_path": first, "text_encoder_name_or_path": second, "unet_name_or_path": first,
          "unet_config_file": "unet_sd1"}, (0, 1, 0)),
        ({"vae_name_or_path": f"{second}/vae", "text_encoder_name_or_path": f"{first}/text_encoder",
          "unet_config_file": str(network)}, (1, 0, None)),
        ({"vae_name_or_path": first, "text_encoder_config_file": str(clip), "unet_name_or_path": second,
          "train_text_encoder": True, "tokenizer_name": f"{first}/tokenizer"}, (0, None, 1)),
    ]  # fmt: skip
    for settings, expected in cases:
        config = StableDiffusionConfig(**settings)
        config.check()
        StableDiffusion().check(config, DATA)
        model = StableDiffusion().build(config, DATA, seed=0)
        assert tuple(source_of(model, pipelines).values()) == expected, settings
        trained = {name.partition(".")[0] for name in model.trained_parameters()}
        assert trained == {"unet"} | ({"text_encoder"} if config.train_text_encoder else set())
        assert (model.caption_encoder is None) == config.train_text_encoder


def test_what_goes_before_is_said(pipelines, tiny):
    words = ["--output_dir", "o", "--file_list", tiny.file_list, "--model_name_or_path", pipelines[0]]
    words += ["--unet_config_file", "unet_sd1", "--vae_name_or_path", pipelines[1]]
    idle = {one.name: one.needs.words for one in idle_settings(read_recipe(words, True, StableDiffusionConfig), True)}
    assert {"unet_config_file", "vae_name_or_path"} <= idle.keys()
    assert "--model_name_or_path" in idle["unet_config_file"]


PARTS = {"vae_name_or_path": "a/b", "text_encoder_name_or_path": "a/b", "unet_name_or_path": "a/b"}


@pytest.mark.parametrize("missing", PARTS)
def test_a_component_that_nothing_gives_is_named(missing):
    with pytest.raises(ConfigError, match=f"nothing gives the {missing.removesuffix('_name_or_path')}: .*--{missing}"):
        StableDiffusionConfig(**PARTS | {missing: None}).check()
    StableDiffusionConfig(**PARTS).check()


def test_a_new_text_encoder_is_trained_and_has_a_named_tokenizer(tiny):
    given = PARTS | {"text_encoder_name_or_path": None, "text_encoder_config_file": tiny.config("clip")}
    with pytest.raises(ConfigError, match="add --train_text_encoder"):
        StableDiffusionConfig(**given).check()
    config = StableDiffusionConfig(**given, train_text_encoder=True)
    config.check()
    with pytest.raises(ConfigError, match="name its folder: --tokenizer_name"):
        StableDiffusion().build(config, DATA, 0)
    with pytest.raises(ConfigError, match="omit --train_text_encoder"):
        StableDiffusion().check(config, DataOptions(resolution=64, text_embeddings="cached"))


def test_a_model_with_an_ldmbert_is_another_family(tmp_path):
    write_weights(small_weights(), "diffusers", tmp_path / "ldm")
    config = StableDiffusionConfig(model_name_or_path=str(tmp_path / "ldm"))
    with pytest.raises(ModelError, match="train it as `family: ldm`"):
        StableDiffusion().check(config, DATA)


def test_a_new_text_encoder_is_drawn_as_published(tiny):
    config = read_new_config("clip", tiny.config("clip"), "") | {"hidden_size": 256, "num_hidden_layers": 1}
    layer = build_network("text_encoder", config, seed=3).text_model
    block, width = layer.encoder.layers[0], 256
    expected = {
        layer.embeddings.token_embedding: 0.02, layer.embeddings.position_embedding: 0.01,
        block.self_attn.q_proj: width**-0.5, block.self_attn.out_proj: (2 * width) ** -0.5,
        block.mlp.fc1: (2 * width) ** -0.5, block.mlp.fc2: (2 * width) ** -0.5,
    }  # fmt: skip
    for one, std in expected.items():
        assert float(one.weight.std()) == pytest.approx(std, rel=0.05)
    assert not block.mlp.fc1.bias.any() and (block.layer_norm1.weight == 1).all()
    again = build_network("text_encoder", config, seed=3).text_model.encoder.layers[0].mlp.fc1.weight
    assert (again == block.mlp.fc1.weight).all()


def test_recomputing_changes_nothing(pipelines):
    gradients = []
    for recompute in (False, True):
        model = StableDiffusion().build(
            StableDiffusionConfig(model_name_or_path=pipelines[0], train_text_encoder=True), DATA, 0
        )
        rng, seen = np.random.default_rng(0), []
        if recompute:
            for component in model.components.values():
                if component.trained:
                    component.recompute()
        model.text_encoder.text_model.encoder.layers[0].register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        model.train()
        normal = lambda rng=rng: paddle.to_tensor(rng.standard_normal((1, 4, 8, 8), dtype=np.float32))  # noqa: E731
        ids = paddle.to_tensor(rng.integers(0, CLIP["vocab_size"], (1, 77)))
        moments = paddle.stack([normal(), normal()], axis=1)
        given = {"moments": moments, "noise": normal(), "posterior_noise": normal(), "input_ids": ids}
        model(timesteps=paddle.to_tensor([400]), **given).value.backward()
        assert len(seen) == 1 + recompute
        gradients.append({name: one.grad.numpy() for name, one in model.trained_parameters().items()})
    for name, gradient in gradients[0].items():
        assert (gradient == gradients[1][name]).all(), name


def test_an_export_says_what_it_is(pipelines, tmp_path):
    for folder, family in ((pipelines[0], "stable_diffusion"), (tmp_path / "ldm", "ldm")):
        if family == "ldm":
            write_weights(small_weights(), "diffusers", folder)
        assert json.loads(Path(folder, "model.json").read_text())["family"] == family


def test_an_export_names_the_class_of_its_tokenizer(tiny, tmp_path):
    """CLIP's encoder over words of one's own has BERT's tokenizer, in Stable Diffusion's pipeline."""
    weights = small_weights()
    weights.components["text_encoder"] = read_component("text_encoder", write_clip(tmp_path / "c"))
    for tokenizer, name in ((tmp_path / "c/tokenizer", "CLIPTokenizer"), (tiny.folder / "tokenizer", "BertTokenizer")):
        weights.tokenizer = tokenizer
        write_weights(weights, "diffusers", tmp_path / name)
        assert json.loads((tmp_path / name / "model_index.json").read_text())["tokenizer"] == ["transformers", name]


@pytest.mark.turn("a family learns eight pictures", 1)
@pytest.mark.slow
def test_it_overfits_eight_pictures(tiny):
    """Of eight latents and captions, whatever the noise: the error falls to less than a third in 150 updates."""
    config = StableDiffusionConfig(
        vae_name_or_path=tiny.vae, text_encoder_config_file=tiny.config("clip"), unet_config_file=tiny.config("unet"),
        tokenizer_name=tiny.tokenizer, model_max_length=12, train_text_encoder=True, prediction_type="v_prediction",
    )  # fmt: skip
    model = StableDiffusion().build(config, DataOptions(resolution=32), seed=1)
    assert overfit(model) < 1 / 3
