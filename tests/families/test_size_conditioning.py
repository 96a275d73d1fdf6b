"""A UNet that is told sizes: what it takes, that it listens, and that it is the same network again once it is read."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest
from tiny_model import load_pipeline, make_batch, make_model

from ppldm.data.inputs import Sizes
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.diffusion.drawing import Drawing
from ppldm.diffusion.guided import draw
from ppldm.families.ldm import LdmConfig
from ppldm.families.ldm_build import build_ldm, weights_of
from ppldm.networks.build import save_component
from ppldm.networks.configs import SIZE_EMBEDDING
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.source import open_model
from ppldm.weights.write import write_weights

SIZES = [[512, 768, 0, 40, 32, 32], [100, 60, 7, 0, 32, 32], [0] * 6]


@pytest.fixture(scope="module")
def model(tiny):
    """With weights in its last layers, which begin as zeros."""
    model = make_model(tiny, size_conditioning=True, size_conditioning_drop=0.25)
    rng = np.random.default_rng(0)
    for parameter in model.unet.parameters():
        parameter.set_value(parameter + paddle.to_tensor(rng.standard_normal(parameter.shape, dtype=np.float32) * 0.05))
    model.eval()
    return model


@pytest.fixture(scope="module")
def exported(model, tiny, tmp_path_factory):
    folder, weights = tmp_path_factory.mktemp("sizes"), weights_of(model)
    weights.tokenizer = load_tokenizer(tiny.tokenizer, 12)
    for form in ("ppdiffusers", "diffusers"):
        write_weights(weights, form, folder / form)
    return folder


def predict(model, sizes):
    batch = {name: values[: len(sizes)] for name, values in make_batch(len(SIZES)).items()}
    with paddle.no_grad():
        return model.predict(batch["noise"], batch["timesteps"], batch["input_ids"], paddle.to_tensor(sizes)).numpy()


def test_a_new_unet_gets_layers_for_them_and_is_otherwise_as_before(tiny, model):
    plain = make_model(tiny)
    assert model.inputs["sizes"] == Sizes(0.25) and "sizes" not in plain.inputs
    own = {name for name in model.unet.state_dict() if name.startswith("add_embedding.linear_")}
    assert model.unet.state_dict().keys() - own == plain.unet.state_dict().keys() and len(own) == 4
    assert {name: model.unet.config[name] for name in SIZE_EMBEDDING} == SIZE_EMBEDDING
    assert all(plain.unet.config[name] is None for name in SIZE_EMBEDDING)


def test_each_size_is_embedded_by_sinusoids_side_by_side(model):
    seen = []
    hook = model.unet.add_embedding.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numpy()))
    predict(model, SIZES)
    hook.remove()
    angles = np.array(SIZES, np.float64)[..., None] * 10000 ** (-np.arange(128) / 128)
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).reshape(3, 6 * 256)
    np.testing.assert_allclose(seen[0], expected, atol=1e-4)


def test_each_of_the_six_changes_what_is_predicted(model):
    plain = predict(model, SIZES[:1])
    for number in range(6):
        other = [SIZES[0].copy()]
        other[0][number] += 200
        assert abs(predict(model, other) - plain).max() > 1e-4
    np.testing.assert_allclose(predict(model, SIZES)[:1], plain, atol=1e-5)


def test_gradients_reach_its_layers_and_the_loss_falls(tiny):
    model = make_model(tiny, size_conditioning=True)
    model.train()
    batch = make_batch(4) | {"sizes": paddle.to_tensor([*SIZES, SIZES[1]])}
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=[*model.trained_parameters().values()])
    before = model.unet.add_embedding.linear_1.weight.numpy()
    losses = []
    for _ in range(12):
        loss = model(**batch).value
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.95 * losses[0] and (model.unet.add_embedding.linear_1.weight.numpy() != before).any()


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_what_is_drawn_is_told_to_be_whole_and_as_large_as_it_is(model, tiny, scale):
    tokenizer, seen = load_tokenizer(tiny.tokenizer, 12), []
    hook = model.unet.register_forward_pre_hook(
        lambda _layer, _inputs, given: seen.append(given["added_cond_kwargs"]["time_ids"].tolist()), with_kwargs=True
    )
    pictures = draw(model, tokenizer, ["picture 1", "picture 2"], [0, 0], (4, 5, 6), 9, Drawing(2, scale))
    hook.remove()
    assert pictures.shape == (2, 40, 48, 3)
    assert seen == [[[40, 48, 0, 0, 40, 48]] * (4 if scale > 1 else 2)] * 2  # of both branches of guidance, each step


@pytest.mark.parametrize("form", ["ppdiffusers", "diffusers"])
def test_an_export_says_so_and_is_the_same_network_again(model, exported, form):
    again = load_pipeline(exported / form)
    assert np.array_equal(predict(again, SIZES), predict(model, SIZES))
    assert json.loads((exported / form / "ppldm.json").read_text())["size_conditioning"] is True
    config = json.loads((exported / form / "unet/config.json").read_text())
    assert {name: config[name] for name in SIZE_EMBEDDING} == SIZE_EMBEDDING
    card = (exported / form / "README.md").read_text()
    assert f"pipelines of {form} tell the UNet no sizes" in card and "ppldm.load" in card


def test_compvis_has_no_such_network(exported, tmp_path):
    with pytest.raises(ModelError, match="told sizes.*export it to diffusers"):
        write_weights(open_model(exported / "ppdiffusers").read(), "compvis", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_networks_and_the_setting_must_agree(tiny, model, exported, tmp_path):
    config = LdmConfig(vae_name_or_path=tiny.vae, text_encoder_config_file=tiny.config("ldmbert"), model_max_length=12)
    save_component(make_model(tiny).unet, tmp_path / "plain")
    save_component(model.unet, tmp_path / "told")
    (tmp_path / "told.json").write_text(json.dumps(json.loads(Path(tiny.config("unet")).read_text()) | SIZE_EMBEDDING))
    lacks, takes = "the UNet has no layers for sizes.*addition_embed_type text_time", "add --size_conditioning"
    for changes, words in (
        ({"unet_name_or_path": str(tmp_path / "plain"), "size_conditioning": True}, lacks),
        ({"unet_name_or_path": str(tmp_path / "told")}, takes),
        ({"unet_config_file": str(tmp_path / "told.json")}, takes),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            build_ldm(replace(config, **changes), 100, 3)
        assert "\n" not in str(caught.value)
    whole = LdmConfig(model_name_or_path=str(exported / "ppdiffusers"), model_max_length=12)
    with pytest.raises(ModelError, match=takes):
        build_ldm(whole, 42, 3)
    for given in (
        replace(config, unet_name_or_path=str(tmp_path / "told"), size_conditioning=True),
        replace(config, unet_config_file=str(tmp_path / "told.json"), size_conditioning=True),
    ):
        assert "sizes" in build_ldm(given, 100, 3).inputs


@pytest.mark.parametrize(
    "changes",
    [
        {"addition_embed_type": "image"},
        SIZE_EMBEDDING | {"projection_class_embeddings_input_dim": 2816},  # SDXL's: with an embedding of the caption
        {"class_embed_type": "projection", "projection_class_embeddings_input_dim": 1536},
    ],
)
def test_a_unet_that_asks_for_something_else_is_refused_as_before(tiny, tmp_path, changes):
    (tmp_path / "unet.json").write_text(json.dumps(json.loads(Path(tiny.config("unet")).read_text()) | changes))
    config = LdmConfig(
        vae_name_or_path=tiny.vae, text_encoder_config_file=tiny.config("ldmbert"), model_max_length=12,
        unet_config_file=str(tmp_path / "unet.json"), size_conditioning=True,
    )  # fmt: skip
    with pytest.raises((ModelError, ConfigError), match="asks for an input that a text-to-image model does not give"):
        build_ldm(config, 100, 3)
