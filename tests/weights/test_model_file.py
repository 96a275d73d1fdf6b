"""model.json says what a model is made of; whoever reads it fills nothing up."""

import json

import numpy as np
import pytest

from ppldm.networks.configs import check_config
from ppldm.utils.checksums import checksum_arrays
from ppldm.utils.errors import ModelError
from ppldm.weights.model_file import (
    LDM,
    Component,
    TokenizerFiles,
    describe,
    read_model_file,
)
from tests.conftest import TEXT_ENCODER_CONFIG, UNET_CONFIG, VAE_CONFIG

PROCESS = {"num_train_timesteps": 1000, "beta_start": 0.001, "beta_end": 0.01, "beta_schedule": "linear",
           "rescale_betas_zero_snr": False, "prediction_type": "v_prediction"}  # fmt: skip
FILES = {
    "vocab.txt": b"[PAD]\na\n",
    "tokenizer_config.json": b'{"do_lower_case": true, "model_max_length": 12}',
    "special_tokens_map.json": b'{"pad_token": "[PAD]"}',
}


def ldm(**changes):
    components = {
        "vae": Component(check_config("vae", VAE_CONFIG | {"scaling_factor": 0.9}, "x"), False, "00ff00ff"),
        "text_encoder": Component(check_config("ldmbert", TEXT_ENCODER_CONFIG, "x"), True),
        "unet": Component(check_config("unet", UNET_CONFIG, "x"), True),
        **changes,
    }
    return describe(LDM, components, PROCESS, TokenizerFiles(12, FILES))


def test_what_is_written_is_read(tmp_path):
    described = ldm()
    described.write(tmp_path)
    found = read_model_file(tmp_path)
    assert found.settings() == described.settings() and found.family == LDM
    assert found.components == described.components and found.process == PROCESS
    assert found.settings()["vae"]["scaling_factor"] == 0.9 and found.settings()["vae"]["weights"] == "00ff00ff"
    assert found.tokenizer == {"class": "BertTokenizer", "max_length": 12, "crc32": described.tokenizer["crc32"]}
    assert {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()} == FILES
    assert described.num_bytes == sum(map(len, FILES.values())) and found.num_bytes == 0
    raw = json.loads((tmp_path / "model.json").read_text())
    assert raw["components"]["vae"].keys() == {"class", "config", "trained", "crc32"}
    assert raw["components"]["unet"]["class"] == "UNet2DConditionModel"


def test_an_autoencoder_has_no_tokenizer_and_no_process(tmp_path):
    described = describe("autoencoder", {"vae": Component(check_config("vae", VAE_CONFIG, "x"), True)})
    described.write(tmp_path)
    assert read_model_file(tmp_path) == described and not (tmp_path / "tokenizer").exists()
    assert described.settings().keys() == {"vae"}


def damaged(tmp_path, change):
    ldm().write(tmp_path)
    path = tmp_path / "model.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return tmp_path


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda v: v.update(format=2), "has format 2, of a later version of ppldm"),
        (lambda v: v.update(family="xyz"), "family xyz is not known; known: ldm, autoencoder"),
        (lambda v: v.pop("family"), "is damaged .*family"),
        (lambda v: v["components"].pop("unet"), "does not describe unet"),
        (lambda v: v.update(process=None), "does not describe the noise schedule"),
        (lambda v: v.update(components=[]), "is damaged"),
        (lambda v: v["components"]["vae"].update(config=3), "is damaged"),
        (lambda v: v["components"]["vae"]["config"].pop("scaling_factor"), "of vae does not say scaling_factor"),
        (lambda v: v["components"]["vae"]["config"].update(scaling_factor="x"), 'scaling_factor "x" must be a number'),
        (lambda v: v["components"]["vae"].update({"class": "VQModel"}), "vae of class 'VQModel' is not known"),
        (lambda v: v["components"]["vae"].update(trained=None), "vae of class"),
        (lambda v: v["components"].update(safety=v["components"]["vae"]), "component 'safety' is not known"),
    ],
)
def test_what_is_missing_or_unknown_is_an_error(tmp_path, change, words):
    with pytest.raises(ModelError, match=f"model.json.*{words}|model.json: {words}"):
        read_model_file(damaged(tmp_path, change))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"format": "1"}', b"[" * 100_000])
def test_what_is_no_model_file_is_an_error(tmp_path, content):
    (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(ModelError, match="model.json .*; copy the folder again"):
        read_model_file(tmp_path)
    with pytest.raises(ModelError, match="cannot read .*model.json"):
        read_model_file(tmp_path / "none")


@pytest.mark.parametrize(
    "name, content, same",
    [
        ("vocab.txt", b"[PAD]\nb\n", False),
        ("tokenizer_config.json", b'{"do_lower_case": false}', False),
        ("tokenizer_config.json", b'{ "model_max_length": 77, "do_lower_case": true}', True),
        ("special_tokens_map.json", b'{"pad_token": "a"}', False),
        ("special_tokens_map.json", b'{"pad_token": {"content": "[PAD]"}, "cls_token": "x"}', True),
        ("merges.txt", b"a b\n", False),
    ],
)
def test_the_tokenizer_s_checksum_is_of_its_ids(name, content, same):
    one, other = TokenizerFiles(12, FILES), TokenizerFiles(77, FILES | {name: content})
    assert (one.crc32 == other.crc32) is same
    assert other.class_name == ("CLIPTokenizer" if name == "merges.txt" else "BertTokenizer")


def test_the_checksum_of_weights_is_of_names_and_bits():
    a, b = np.ones((2, 3), np.float32), np.zeros((), np.float32)
    one = checksum_arrays([("a", a), ("b", b)])
    assert one == checksum_arrays([("b", b), ("a", a)]) and len(one) == 8
    assert one == checksum_arrays([("a", np.asfortranarray(a)), ("b", b)])
    others = [[("c", a), ("b", b)], [("a", -a), ("b", b)], [("a", b), ("b", a)]]
    assert len({one, *map(checksum_arrays, others), checksum_arrays([("a", a), ("b", b)], start=1)}) == 5
