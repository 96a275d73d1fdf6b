"""`--dry_run`: every preset's networks have the published sizes, and take no memory."""

import json
from math import prod
from pathlib import Path

import pytest
from tiny_model import write_base

from ppldm.config.load import list_presets
from ppldm.config.network_files import CONFIG_DIR
from ppldm.families.base import get_family
from ppldm.families.ldm import LdmConfig
from ppldm.training.commands import dry_run
from ppldm.training.commands.train import check_early, read_dry_run, read_recipe, run_training, train
from ppldm.training.doctor.memory import forecast
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.fill import parameter_shapes

pytestmark = pytest.mark.usefixtures("shapes_of_each_config_once")
PUBLISHED = {
    "sd15-finetune": (83_653_863, 123_060_480, 859_520_964),
    "sd15-unet-from-scratch": (83_653_863, 123_060_480, 859_520_964),
    "sd21-finetune": (83_653_863, 340_387_840, 865_910_724),
    "sd2-base-256": (83_653_863, 340_387_840, 865_910_724),
    "sd20-base-to-21-base-laion": (83_653_863, 340_387_840, 865_910_724),
    "sd15-controlnet-canny": (83_653_863, 123_060_480, 859_520_964, 361_279_120),
    "uvit-s2-256": (83_653_863, 123_060_480, 44_692_644),  # published rounded, as 45 M
    "micro-diffusion-256-masked": (83_653_863, 352_984_064, 1_165_442_320),  # published rounded, as 1.16 B
    "autoencoder-f8": (83_653_863, 2_765_633, 14_716_160),
    "ldm-32layer-laion400m": (83_653_863, 581_994_042, 872_300_484),
}
# What other presets leave behind, and a preset starts from: the preset that makes it, and its component's name there.
MADE_BY = {
    ("shapes-world", "vae"): ("shapes-world-autoencoder", "vae"),
    ("shapes-world-controlnet", "vae"): ("shapes-world", "vae"),
    ("shapes-world-controlnet", "text_encoder"): ("shapes-world", "text_encoder"),
    ("shapes-world-controlnet", "unet"): ("shapes-world", "unet"),
    ("cascade-b-tiny-cpu", "vqgan"): ("cascade-a-tiny-cpu", "vqgan"),
    ("cascade-controlnet-tiny-cpu", "prior"): ("cascade-c-tiny-cpu", "prior"),
    ("sd2-base-512", "unet"): ("sd2-base-256", "unet"),
    ("micro-diffusion-256", "transformer"): ("micro-diffusion-256-masked", "transformer"),
    ("micro-diffusion-512", "transformer"): ("micro-diffusion-512-masked", "transformer"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder in which there is nothing."""
    return tmp_path_factory.mktemp("home")


def reckon(home, monkeypatch, name: str, *words, num_devices: int = 1) -> dict:
    monkeypatch.chdir(home)
    return dry_run.reckon(check_early(["--preset", name, *words, "--dry_run"], config=None), num_devices)


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_passes_where_there_is_nothing(home, monkeypatch, name):
    report = reckon(home, monkeypatch, name)
    parts, family = report["components"], get_family(report["family"])
    assert parts.keys() <= family.components.keys() <= parts.keys() | set(family.optional)
    assert 0 < sum(part["trained"] for part in parts.values()) <= sum(part["parameters"] for part in parts.values())
    if name in PUBLISHED:
        assert tuple(part["parameters"] for part in parts.values()) == PUBLISHED[name]


@pytest.mark.parametrize("user, maker", MADE_BY.items())
def test_what_a_preset_leaves_behind_is_of_its_size(home, monkeypatch, user, maker):
    of, by = ({**reckon(home, monkeypatch, preset)["components"][name]} for preset, name in (user, maker))
    assert of["parameters"] == by["parameters"] > 0


def test_what_is_not_there_is_warned_of_and_refused_by_a_training(home, monkeypatch, caplog):
    reckon(home, monkeypatch, "sd3-tiny-cpu")
    for flag in ("file_list", "vae_name_or_path", "tokenizer_name"):
        assert f"the run will need it: --{flag}" in caplog.text
    with pytest.raises((ConfigError, ModelError), match="shapes_world"):
        check_early(["--preset", "sd3-tiny-cpu"], config=None)
    with pytest.raises(ConfigError, match="model.lpips_weights is "):
        check_early(["--preset", "autoencoder-f8"], config=None)
    with pytest.raises(ConfigError, match="--unet_config_file nope"):
        reckon(home, monkeypatch, "sd15-unet-from-scratch", "--unet_config_file", "nope")


def test_operations_and_activations_are_forecast(tiny, tmp_path):
    """Twice the batches of an update are twice the operations, and take no more memory."""
    one, two = (
        forecast(read_recipe([*tiny.flags(tmp_path), "--gradient_accumulation_steps", number], True), 1)
        for number in ("1", "2")
    )
    assert two["operations_an_update"] == 2 * one["operations_an_update"] > 0 and one["updates"] == 4
    assert two["bytes_of_activations"] == one["bytes_of_activations"] > 0 and one["not_counted"] == []
    recipe = read_recipe(tiny.flags(tmp_path), True)
    text = dry_run.describe(dry_run.reckon(recipe, 1) | one | {"not_counted": ["lpips"]})
    assert "GB, without the activations of lpips:" in text and "4 updates: " in text and "in all" in text
    assert one["hours"] * 3600 * dry_run.SPEED == pytest.approx(4 * one["operations_an_update"])


def test_what_is_trained(home, monkeypatch):
    def trained(name):
        return [part["trained"] for part in reckon(home, monkeypatch, name)["components"].values()]

    assert trained("sd15-finetune") == [0, 0, 859_520_964]
    assert trained("sd15-finetune-text-encoder") == [0, 123_060_480, 859_520_964]
    assert trained("ldm-32layer-laion400m") == [0, 542_895_360, 872_300_484], "to_logits is not trained"


def test_adapters_are_counted_as_they_are_built(tiny, tmp_path, monkeypatch, capsys):
    """Low-rank layers, new tokens and those of the vocabulary, of a model that is here."""
    words = ["--model_name_or_path", write_base(tiny), "--file_list", tiny.file_list, "--output_dir", tmp_path / "run",
             "--resolution", 32, "--model_max_length", 12, "--lora_rank", 3, "--lora_modules", "to_q", "conv1", "out",
             "--lora_components", "unet", "text_encoder", "--train_tokens", "<a>=^pict", "^[0-9]$", "<b>"]  # fmt: skip
    words = [*map(str, words)]
    recipe = read_recipe(words, True, LdmConfig)
    model = get_family("ldm").build(recipe.model, recipe.data, 0)
    built = {name: sum(one.size for one in layer.parameters()) for name, layer in model.adapters.items()}
    run_training([*words, "--dry_run", "--json"], True, LdmConfig)
    report = json.loads(capsys.readouterr().out)
    trained = {name: part["trained"] for name, part in report["components"].items()}
    assert trained == {
        "vae": 0,
        "text_encoder": built["text_encoder_lora"] + built["text_encoder_tokens"],
        "unet": built["unet_lora"],
    }
    whole = sum(part["parameters"] for part in report["components"].values())
    assert report["bytes_a_device"]["weights"] == 4 * (whole + sum(trained.values()))


def test_new_tokens_need_no_vocabulary(home, monkeypatch):
    """Stable Diffusion is not here: a new token is one row of its table, 768 wide."""
    words = ("--train_tokens", "<fido>=^dog", "<cat>")
    report = reckon(home, monkeypatch, "sd15-lora", *words)
    assert report["components"]["text_encoder"]["trained"] == 2 * 768
    with pytest.raises(ModelError, match="stable-diffusion-v1-5"):
        reckon(home, monkeypatch, "sd15-lora", *words, "^dog")


def test_devices_that_are_named_are_reckoned_with(tiny, capfd):
    train([*tiny.flags("out"), "--dry_run", "--json", "--devices", "0,1,2"])
    assert json.loads(capfd.readouterr().out)["num_devices"] == 3


def test_json_is_of_a_dry_run():
    assert read_dry_run(["--dry_run", "--json", "--num_devices", "2"]) == (2, True) and read_dry_run([]) is None
    with pytest.raises(ConfigError, match="--json is for --dry_run"):
        read_dry_run(["--json"])


HALVES = ("--bf16", "true", "--fp16_opt_level", "O2")


@pytest.mark.parametrize("words, sharding", [
    ((), ""), ((), "stage1"), ((), "stage2"), (HALVES, ""), (HALVES, "stage1"), (("--use_ema", "true"), "stage2"),
    (("--use_ema", "true"), "stage3"),
])  # fmt: skip
def test_bytes_of_a_device(home, monkeypatch, words, sharding):
    words = ("--bf16", "false", "--sharding", sharding, *words)
    report = reckon(home, monkeypatch, "sd15-finetune", *words, num_devices=3)
    halves, unet, text_encoder = "O2" in words, 859_520_964, 123_060_480
    elsewhere = 4 * (unet - unet // 3) - unet // 3 if sharding == "stage3" else 0  # but for a quarter of a share
    assert report["bytes_elsewhere"] == elsewhere
    assert report["bytes_a_device"] == {
        "weights": 4 * 83_653_863 + (2 if halves else 4) * (unet + text_encoder) - elsewhere,
        "gradients": 4 * unet // (3 if sharding in ("stage2", "stage3") else 1),
        "optimizer": (12 if halves else 8) * unet // (3 if sharding else 1),
        "average": 4 * unet // (3 if sharding == "stage3" else 1) if "--use_ema" in words else 0,
    }
    assert report["samples_an_update"] == 3 * 2 * 8


def test_a_laion_recipe_has_the_published_batch(home, monkeypatch):
    """64 devices make 2,048 samples an update, from 2.0-base, whichever it predicts."""
    for name in ("sd20-base-to-21-base-laion", "sd20-base-to-v-laion"):
        assert reckon(home, monkeypatch, name, num_devices=64)["samples_an_update"] == 2048


def test_it_takes_no_memory():
    """A network of a hundred thousand gigabytes has shapes too."""
    config = json.loads((CONFIG_DIR / "clip_vit_l.json").read_text()) | {"vocab_size": 1 << 20, "hidden_size": 1 << 20}
    sizes = [prod(shape) for shape in parameter_shapes("text_encoder", config | {"num_attention_heads": 8}).values()]
    assert sum(sizes) > 1e12


def test_what_is_not_here_is_said(home, monkeypatch):
    with pytest.raises(ModelError, match="someone/model: there is no config.json of its vae here; download"):
        reckon(home, monkeypatch, "sd15-finetune", "--model_name_or_path", "someone/model")
    from toy import registered_toy

    with registered_toy(), pytest.raises(ConfigError, match="--dry_run does not know the networks of"):
        get_family("toy").networks(None, None)
