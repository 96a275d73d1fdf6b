"""Published sizes, and what is said of configs and folders that cannot work."""

import json
import shutil
from math import prod

import paddle
import pytest
from tiny_model import load_pipeline

from ppldm.config.network_files import KNOWN_MODELS
from ppldm.families.ldm import LdmConfig
from ppldm.families.ldm_build import build_ldm
from ppldm.networks.build import resize_text_encoder
from ppldm.networks.configs import downscale_factor, latent_shape, read_json_config, read_new_config
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.fill import load_vae, parameter_shapes


@pytest.mark.parametrize("file, whole, encoder", [("ldmbert", 581_994_042, 542_895_360),
                                                  ("ldmbert_12", 122_562_618, 99_091_200)])  # fmt: skip
def test_published_text_encoders(file, whole, encoder):
    sizes = {name: prod(shape) for name, shape in parameter_shapes("text_encoder", read_json_config(file, "")).items()}
    assert sum(sizes.values()) == whole
    assert sum(size for name, size in sizes.items() if name.startswith("model.")) == encoder


@pytest.mark.parametrize("file, expected", [("unet", 872_300_484), ("unet_12", 859_520_964)])
def test_published_unets(file, expected):
    assert sum(map(prod, parameter_shapes("unet", read_json_config(file, "")).values())) == expected


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_published_pairs_fit(name):
    config = LdmConfig(model_name_or_path=name)
    unet, text_encoder = (read_json_config(config.file_of(component), "") for component in ("unet", "text_encoder"))
    assert unet["cross_attention_dim"] == text_encoder["d_model"]


def test_vocabulary_and_length_are_the_tokenizers(tiny):
    sizes = {"vocab_size": 18000, "max_position_embeddings": 7}
    config = read_new_config("ldmbert", tiny.config("ldmbert"), "")
    arguments = LdmConfig(
        vae_name_or_path=tiny.vae, text_encoder_config_file=tiny.config("ldmbert"),
        unet_config_file=tiny.config("unet"), model_max_length=7,
    )  # fmt: skip
    assert resize_text_encoder(config, arguments, 18000) == config | sizes
    text_encoder = build_ldm(arguments, 18000, 0).text_encoder
    assert text_encoder.model.embed_tokens.weight.shape == [18000, 32]
    assert text_encoder.model.embed_positions.weight.shape == [7, 32]
    with pytest.raises(ConfigError, match="json: pad_token_id 90 must be below vocab_size 80; correct it"):
        resize_text_encoder(config | {"pad_token_id": 90}, arguments, 80)


def test_shapes_of_latents(tiny):
    config = load_vae(tiny.vae).config
    assert downscale_factor(config) == 8
    assert latent_shape(config, height=64, width=32) == (4, 8, 4)
    for side in (60, 0, -8):
        for height, width in ((side, 64), (64, side)):
            with pytest.raises(ConfigError, match=f"width {width}, height {height}: choose multiples of 8"):
                latent_shape(config, height, width)


def test_bad_folders_name_the_folder(tmp_path, tiny):
    with pytest.raises(ModelError, match=f"no folder or file {tmp_path}/none"):
        load_vae(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty has no config.json"):
        load_vae(tmp_path / "empty")
    (tmp_path / "half").mkdir()
    shutil.copy(f"{tiny.vae}/config.json", tmp_path / "half")
    with pytest.raises(ModelError, match="half has no weights"):
        load_vae(tmp_path / "half")
    with pytest.raises(ModelError, match="has no vae or .*: it is no pipeline or checkpoint; name one"):
        load_pipeline(tmp_path)


def test_parts_that_do_not_fit_are_refused(tmp_path, tiny):
    narrow = tmp_path / "narrow.json"
    narrow.write_text(json.dumps(read_json_config(tiny.config("unet"), "") | {"cross_attention_dim": 16}))
    arguments = LdmConfig(
        vae_name_or_path=tiny.vae, text_encoder_config_file=tiny.config("ldmbert"), unet_config_file=str(narrow)
    )
    with pytest.raises(ModelError, match="cross_attention_dim"):
        build_ldm(arguments, 100, 0)


def test_parameter_names_do_not_depend_on_what_was_built_before(tiny):
    arguments = LdmConfig(
        vae_name_or_path=tiny.vae, text_encoder_config_file=tiny.config("ldmbert"), unet_config_file=tiny.config("unet")
    )
    first = [p.name for p in build_ldm(arguments, 100, 0).parameters()]
    paddle.nn.Linear(2, 2)
    assert [p.name for p in build_ldm(arguments, 100, 0).parameters()] == first
    assert len(set(first)) == len(first)
