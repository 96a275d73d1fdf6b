"""Config files of open-diffusion and Stable Cascade: every key of theirs is translated or has a reason."""

import io
import json
import tarfile
from contextlib import closing

import pytest
from formats import WRITERS, add_member
from PIL import Image

from ppldm.cli.main import run
from ppldm.config.data import DataOptions
from ppldm.config.foreign import SYSTEMS, UNSAID, Source, translate_file
from ppldm.config.load import file_layers
from ppldm.config.option import check_value, options
from ppldm.config.training import TrainingOptions
from ppldm.data.control import make_filter
from ppldm.data.filelist import read_sources
from ppldm.data.formats.open import open_part
from ppldm.data.formats.row import Row
from ppldm.utils.errors import ConfigError

OPEN_DIFFUSION = """
wandb: {api_key: very-secret, entity: me}
system: {gradient_accumulation: 2, batch_size: 32, workers: 6, dist_url: '${distributed.dist_url}'}
distributed: {dist_url: 'env://'}
experiment: {log_dir: logs, name: first, project: '???', num_examples_to_see: '???', save_only_most_recent: true,
             save_every: 2000, requeue: true}
optimizer: {name: adamw, params: {learning_rate: 0.0001, beta1: 0.9, beta2: 0.98}}
model:
  vae: {pretrained: sd}
  unet: {target: UNet2DConditionModel, params: {act_fn: silu, block_out_channels: [320, 640]}}
  use_ema: true
  mixed_precision: bf16
  gradient_checkpointing: true
dataset:
  type: WebDataset
  params: {path: 'parts/{008..011}.tar', batch_size: '${system.batch_size}', filters: {pwatermark: "<=0.5"},
           num_examples_to_see: '${experiment.num_examples_to_see}', resolution: 512}
lr_scheduler: {scheduler: CosineWithWarmup, params: {learning_rate: 0.0002, warmup_length: 500}}
"""
STABLE_CASCADE = """
experiment_id: stage_c
checkpoint_path: /models
output_path: /pictures
model_version: 3.6B
wandb_project: StableCascade
lr: 1.0e-4
batch_size: 256
image_size: 768
multi_aspect_ratio: [1/1, 1/2]
grad_accum_steps: 4
updates: 500000
backup_every: 50000
save_every: 2000
warmup_updates: 1
use_fsdp: True
ema_start_iters: 5000
webdataset_path: [file:/data/a.tar, 'file:/data/b.tar']
dataset_filters:
  - ['aesthetic_score', 'lambda s: s > 4.5']
dtype: float64
module_filters: ['.attn']
rank: 4
train_tokens:
  - ['^snail', null]
  - ['[fernando]', '^dog</w>']
effnet_checkpoint_path: models/effnet_encoder.safetensors
lora_checkpoint_path: lora.safetensors
"""


def translate(tmp_path, text: str, num_devices: int = 8):
    (tmp_path / "theirs.yaml").write_text(text)
    return translate_file(tmp_path / "theirs.yaml", num_devices, "mine")


def test_open_diffusion(tmp_path):
    found = translate(tmp_path, OPEN_DIFFUSION)
    assert found.system == "open-diffusion"
    assert {key: value for key, (value, _) in found.settings.items()} == {
        "family": "stable_diffusion",
        **{"data.caption_drop": 0.0, "data.crop_fraction": 1.0, "data.random_crop": False},
        **{"data.interpolation": "bicubic", "logging.logging_steps": 40},
        "run.save_at": [0],
        "logging.report_to": ["visualdl", "wandb"],
        "run.gradient_accumulation_steps": 2,
        "run.per_device_train_batch_size": 32,
        "compute.dataloader_num_workers": 6,
        "run.output_dir": "???",
        "run.max_samples": "???",
        "run.save_total_limit": 1,
        "run.save_steps": 2000,
        "optimizer.optimizer": "adamw",
        "optimizer.learning_rate": 0.0002,
        "optimizer.adam_beta1": 0.9,
        "optimizer.adam_beta2": 0.98,
        "model.vae_name_or_path": "sd",
        "model.unet_config_file": "mine.unet.json",
        "optimizer.use_ema": True,
        "optimizer.ema_decay": 0.995,
        "compute.bf16": True,
        "compute.recompute": True,
        "data.file_list": "mine.filelist.list",
        "data.where": '{"pwatermark": "<=0.5"}',
        "data.resolution": 512,
        "optimizer.lr_scheduler_type": "cosine",
        "optimizer.warmup_steps": 500,
    }
    assert found.files["mine.filelist"].endswith("/parts/{008..011}.tar\n")  # a filelist has braces too
    assert found.files["mine.filelist.list"] == "mine.filelist format=webdataset\n"
    assert '"block_out_channels"' in found.files["mine.unet.json"]
    assert set(found.left_out) == {
        "wandb.entity", "system.dist_url", "distributed.dist_url", "experiment.requeue",
        "model.unet.target",
    }  # fmt: skip
    assert "very-secret" not in str(found)


@pytest.mark.parametrize(
    "shaped, said, found", [(True, "", 0.05), (True, "0.2", 0.2), (True, "0", 0), (False, "0.2", None)]
)
def test_random_shapes_of_stable_cascade_are_a_twentieth_where_nothing_is_said(tmp_path, shaped, said, found):
    text = STABLE_CASCADE if shaped else STABLE_CASCADE.replace("multi_aspect_ratio: [1/1, 1/2]\n", "")
    settings = translate(tmp_path, text + (f"bucketeer_random_ratio: {said}\n" if said else "")).settings
    assert settings.get("data.bucket_random_ratio", (None,))[0] == found


def test_stable_cascade(tmp_path):
    found = translate(tmp_path, STABLE_CASCADE)
    settings = {key: value for key, (value, _) in found.settings.items()}
    assert found.system == "Stable Cascade"
    assert settings["run.output_dir"] == "/models/stage_c" and settings["run.max_steps"] == 500000
    assert settings["run.per_device_train_batch_size"] == 8 and settings["compute.sharding"] == "stage2"
    assert settings["run.save_steps"] == settings["validation.image_logging_steps"] == 2000
    assert settings["data.where"] == '[["aesthetic_score", "lambda s: s > 4.5"]]'
    assert found.files["mine.filelist"] == "/data/a.tar\n/data/b.tar\n"
    # A value that has no counterpart, of a key that has one, is to be filled in.
    assert settings["compute.bf16"] == "???" and "float64 is not a precision" in found.left_out["dtype"]
    assert settings["data.buckets"] == "ratios" and settings["data.bucket_ratios"] == ["1/1", "1/2"]
    assert set(found.left_out) == {"output_path", "dtype", "lora_checkpoint_path", "wandb_project"}
    assert found.left_out["wandb_project"] == "for wandb, export WANDB_PROJECT=StableCascade"
    assert settings["data.bucket_upscale"] and not settings["data.smart_crop"]
    own = {
        "family": "cascade_prior",
        "run.save_at": [1],
        "model.loss_weighting": "p2",
        **{"data.caption_drop": 0.05, "optimizer.weight_decay": 0.01, "optimizer.max_grad_norm": 1.0},
        "model.image_encoder_name_or_path": "stabilityai/stable-cascade-prior",
        "model.text_encoder_name_or_path": "stabilityai/stable-cascade-prior",
        "model.prior_name_or_path": "stabilityai/stable-cascade-prior",
        "model.effnet_name_or_path": "models/effnet_encoder.safetensors",
        **{"model.lora_modules": ["attention"], "model.lora_rank": 4, "model.lora_alpha": 1},
        "model.train_tokens": ["^snail", "[fernando]=^dog</w>"],
    }
    assert own.items() <= settings.items()
    assert "cannot be shared by 20 batches" in translate(tmp_path, STABLE_CASCADE, 5).left_out["batch_size"]


def test_what_no_key_says_is_as_their_code_does_it(tmp_path):
    """And the same keys in a file go before it."""
    settings = translate(tmp_path, "lr: 1\nmodel_version: 3B\nadaptive_loss_weight: true").settings
    assert settings["data.smart_crop"] == (True, "Stable Cascade's default") and settings["compute.bf16"][0]
    assert settings["model.loss_weighting"] == ("adaptive", "adaptive_loss_weight")
    assert "model.image_encoder_name_or_path" not in settings
    assert translate(tmp_path, "system: {workers: 1}").settings["run.save_steps"][0] == 1000


def test_prompts_to_draw_are_those_of_their_file(tmp_path):
    from ppldm.training.prepare import read_validation_prompts

    (tmp_path / "uid_caption.csv").write_text('uid,caption\n1,a cat\n2,"a dog, black"\n')
    text = f"eval_caption_file: {tmp_path}/uid_caption.csv, num_eval_images: 2, save_every: 300"
    found = translate(tmp_path, f"experiment: {{{text}}}")
    settings = {key: value for key, (value, _) in found.settings.items()}
    assert read_validation_prompts(settings["validation.validation_prompts"]) == ["a cat", "a dog, black"]
    assert settings["validation.image_logging_steps"] == settings["run.save_steps"] == 300
    assert set(found.left_out) == {"experiment.num_eval_images"}


def test_a_project_is_a_folder_and_a_variable(tmp_path):
    found = translate(tmp_path, "experiment: {log_dir: logs, project: my pictures, name: first}")
    assert found.settings["run.output_dir"][0] == "logs/my pictures/first"
    assert found.left_out == {"experiment.project": "for wandb, export WANDB_PROJECT='my pictures'"}


@pytest.mark.parametrize("key", ["scheduler", "noise_scheduler_training"])
@pytest.mark.parametrize("folder", ["", "scheduler", None])
def test_a_schedule_that_is_here_is_read(tmp_path, key, folder):
    """Of a folder, a pipeline, or what is written in the config itself."""
    stated = {"beta_schedule": "scaled_linear", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    whole = stated | {"beta_start": 0.00085, "beta_end": 0.012}
    value = json.dumps({"params": whole} if folder is None else {"pretrained": str(tmp_path / "sd")})
    if folder is not None:
        (tmp_path / "sd" / folder).mkdir(parents=True)
        (tmp_path / "sd" / folder / "scheduler_config.json").write_text(json.dumps(whole))
    settings = translate(tmp_path, f"model: {{{key}: {value}}}").settings
    assert {name: settings[f"model.{name}"][0] for name in stated} == stated


def test_a_schedule_that_is_not_here_is_to_be_said(tmp_path):
    found = translate(tmp_path, "model: {scheduler: {pretrained: stabilityai/stable-diffusion-2}}")
    assert found.settings["model.prediction_type"][0] == "???"
    assert "so it was not read: say whether" in found.left_out["model.scheduler.pretrained"]
    found = translate(tmp_path, "model: {scheduler: {params: {beta_end: 0.012}}}")
    assert "this schedule has {'beta_start': 0.0001}" in found.left_out["model.scheduler.params"]


def test_stages_are_known_by_their_versions(tmp_path):
    for text, name in (
        ("model_version: 700M", "stabilityai/stable-cascade/decoder_lite"),
        ("generator_checkpoint_path: b.safetensors\nmodel_version: 3B", "b.safetensors"),
    ):
        settings = translate(tmp_path, f"lr: 1\n{text}").settings
        assert settings["family"][0] == "cascade_decoder" and settings["model.decoder_name_or_path"][0] == name
        assert settings["model.vqgan_name_or_path"][0] == "stabilityai/stable-cascade"
    for text, name in (("true", "adamw8bit"), ("false", "adamw")):
        found = translate(tmp_path, f"lr: 1\nmodel_version: 3B\nuse_8bit_adam: {text}")
        assert found.settings["optimizer.optimizer"][0] == name and "use_8bit_adam" not in found.left_out
    left_out = translate(tmp_path, "lr: 1\nmodel_version: 9B").left_out
    assert "model_version 9B is not built here" in left_out["model_version"]


@pytest.mark.parametrize(
    "text, control",
    [
        ("CannyFilter\ncontrolnet_filter_params:\n  resize: 224", "canny,channels=1,resize=224"),
        ("SREffnetFilter\ncontrolnet_filter_params: {scale_factor: 0.5}", "super-resolution,scale=0.5"),
        (
            "InpaintFilter\ncontrolnet_filter_params: {thresold: [0.04, 0.4], p_outpaint: 0.4}",
            "inpainting,threshold_low=0.04,threshold_high=0.4,p_outpaint=0.4",
        ),
        ("CannyFilter", "canny,channels=1"),
        ("SRFilter", "super-resolution,scale=0.25"),
        ("SRFilter\ncontrolnet_filter_params: {scale_factor: 0.125}", "super-resolution,scale=0.125"),
        ("SREffnetFilter", "super-resolution,scale=0.5"),
        ("PidiFilter", "PidiFilter is not a filter here"),
        ("CannyFilter\ncontrolnet_filter_params: {blur: 3}", "CannyFilter, blur is not a filter here"),
    ],
)
def test_control_networks_of_stable_cascade(tmp_path, text, control):
    blocks = "controlnet_blocks: [0, 4]\ncontrolnet_bottleneck_mode: 'large'\noffset_noise: 0.1"
    found = translate(tmp_path, f"model_version: 3.6B\n{blocks}\ncontrolnet_filter: {text}")
    settings = {key: value for key, (value, _) in found.settings.items()}
    assert settings["family"] == "cascade_controlnet" and settings["model.controlnet_blocks"] == [0, 4]
    assert settings["model.controlnet_bottleneck"] == "large" and settings["model.noise_offset"] == 0.1
    if " is not " in control:
        assert control in found.left_out["controlnet_filter"] and settings["model.control"] == "???"
    else:
        assert settings["model.control"] == control and make_filter(control)


def test_the_keys_of_the_tables_are_settings_here():
    from ppldm.families.cascade import CascadeControlNetConfig, CascadeDecoderConfig, CascadePriorConfig
    from ppldm.families.ldm import StableDiffusionConfig

    groups = (
        DataOptions,
        TrainingOptions,
        StableDiffusionConfig,
        CascadePriorConfig,
        CascadeDecoderConfig,
        CascadeControlNetConfig,
    )
    known = {stated.key for group in groups for stated in options(group).values()}
    for system, table in SYSTEMS.items():
        assert UNSAID[system].keys() <= known | {"family"}
        for key, counterpart in table.items():
            assert counterpart.note or counterpart.keys, key
            assert set(counterpart.keys) <= known, key


def test_what_is_translated_is_what_the_settings_take(tmp_path):
    groups = [options(group) for group in (DataOptions, TrainingOptions)]
    known = {stated.key: stated for group in groups for stated in group.values()}
    for text in (OPEN_DIFFUSION, STABLE_CASCADE):
        for key, (value, _) in translate(tmp_path, text).settings.items():
            if key in known and value != "???":
                check_value(known[key], value, key)


def test_filters_are_conditions_of_ours(tmp_path):
    from ppldm.data.select.expression import parse_where

    for text in (OPEN_DIFFUSION, STABLE_CASCADE):
        assert parse_where(translate(tmp_path, text).settings["data.where"][0])


@pytest.mark.parametrize(
    "text, lines",
    [
        ("pipe:aws s3 cp s3://a/{08..09}.tar -", ["s3://a/{08..09}.tar"]),
        ("pipe:curl -s -L https://host/a.tar", ["https://host/a.tar"]),
        ("s3://a/set", ["s3://a/set/**/*.tar"]),
        ("s3://a/{0..3}", ["s3://a/{0..3}/**/*.tar"]),
        ("file:/x/{0..1}.tar", ["/x/{0..1}.tar"]),
    ],
)
def test_places_in_stores_are_lines_of_the_filelist(tmp_path, text, lines):
    found = translate(tmp_path, f"lr: 1\nwebdataset_path: ['{text}']")
    assert found.files["mine.filelist"].splitlines() == lines


OF_THEIRS = "dataset: {type: %s, params: {path: '%s'%s}}"


@pytest.mark.parametrize(
    "config, format, suffix, caption",
    [
        ("webdataset_path: 'file:PLACE'", "webdataset", ".tar", "a cat"),
        ("webdataset_path: ['PLACE']", "webdataset", ".tar", "a cat"),
        ("webdataset_path: list.yml", "webdataset", ".tar", "a cat"),
        (OF_THEIRS % ("WebDataset", "PLACE", ""), "webdataset", ".tar", "a cat"),
        (OF_THEIRS % ("parquet", "PLACE", ""), "parquet", ".parquet", "a cat"),
        (OF_THEIRS % ("parquet", "PLACE", ""), "parquet", "", "a cat"),
        (OF_THEIRS % ("ClassificationWebDataset", "PLACE", ", idx_to_prompt: c.json"), "webdataset", ".tar", "tench"),
        (OF_THEIRS % ("ClassificationWebDataset", "PLACE", ", class_mapping: {'0': tench}"), "webdataset", "", "tench"),
    ],
)  # fmt: skip
def test_the_rows_of_what_is_imported_are_read(tmp_path, monkeypatch, config, format, suffix, caption):
    """Through the list that the command writes, from another folder."""
    names = [tmp_path / f"x_{number}{suffix}" for number in (0, 1)]
    Image.new("RGB", (20, 18)).save(picture := io.BytesIO(), "PNG")
    for name in names:
        WRITERS[format](name, [Row("a cat", picture.getvalue(), {"key": "0"})])
        if caption != "a cat":
            with tarfile.open(name, "w") as tar:
                add_member(tar, "0.png", picture.getvalue())
                add_member(tar, "0.cls", b"0")
    place = tmp_path / f"x_{{0..1}}{suffix}"
    (tmp_path / "c.json").write_text('{"0": "tench"}')
    (tmp_path / "list.yml").write_text(f"- {names[0]}\n- file:{names[1]}\n")
    (tmp_path / "theirs.yaml").write_text("lr: 1\n" * ("webd" in config) + config.replace("PLACE", str(place)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    run(["config", "import", "theirs.yaml", "--out", "mine/it.yaml"])
    (layer,) = file_layers("mine/it.yaml")
    (source,) = read_sources(layer.values["data.file_list"])
    assert source.format == format and list(source.parts) == names
    for part in source.parts:
        with closing(open_part(part, source)) as rows:
            assert [rows.read(number).caption for number in range(len(rows))] == [caption]


def test_places_elsewhere_are_left_to_the_user(tmp_path):
    found = translate(tmp_path, "lr: 1\nwebdataset_path: ['ftp://a/b', 'file:/x.tar']")
    assert found.settings["data.file_list"][0] == "???" and "ftp://a/b" in found.left_out["webdataset_path"]
    found = translate(tmp_path, "lr: 1\nwebdataset_path: gone.yml")
    assert (
        found.settings["data.file_list"][0] == "???" and "gone.yml cannot be read" in found.left_out["webdataset_path"]
    )
    text = OF_THEIRS % ("WebDataset", "x.tar", ", idx_to_prompt: a b.json")
    assert "takes no path with a space" in translate(tmp_path, text).left_out["dataset.params.path"]
    assert translate(tmp_path, "lr: 1\nupdate: 3").left_out["update"].endswith("did you mean updates?")


def test_a_file_of_neither_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="theirs.yaml is not a config of open-diffusion or Stable Cascade"):
        translate(tmp_path, "data: {resolution: 3}")
    with pytest.raises(ConfigError, match="system.batch_size .* cannot be resolved: .*'a.b' not found"):
        translate(tmp_path, "system: {batch_size: '${a.b}'}")


def test_the_command_writes_a_recipe(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(OPEN_DIFFUSION)
    run(["config", "import", "theirs.yaml", "--out", "sub.yaml"])
    out = capsys.readouterr().out
    assert "sub.yaml: 30 settings" in out and "  experiment.requeue: always so" in out
    layers = file_layers(tmp_path / "sub.yaml")
    assert layers[0].values["data.resolution"] == 512 and (tmp_path / "sub.filelist").is_file()
    assert "very-secret" not in (tmp_path / "sub.yaml").read_text()
    with pytest.raises(ConfigError, match="sub.yaml is there already"):
        run(["config", "import", "theirs.yaml", "--out", "sub.yaml"])


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_value_that_is_to_be_given_stays_one(system):
    """Whatever is made of a value that is there."""
    for key, one in SYSTEMS[system].items():
        if one.keys and not one.any_value:
            assert one.translate("???", Source({}, 1, "x")) == {one.keys[0]: "???"}, key
