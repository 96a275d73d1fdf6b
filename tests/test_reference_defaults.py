"""Defaults of the five documents that the product covers, one by one, as the product's own code reads them.

000: MindSpore's recipe for LAION; 001: open-diffusion; 002: Stable Cascade's training; 003: micro_diffusion, its data
sets; 004: PaddleMIX's LDM example. What differs for a reason is in docs/comparison.md, "Their defaults, and ours where
they differ".
"""

import inspect
from functools import cache
from operator import attrgetter
from pkgutil import resolve_name

import pytest
from command_line import tree_of

from ppldm.config.foreign import UNSAID
from ppldm.networks.configs import read_new_config
from ppldm.prepare.download.download import download
from ppldm.prepare.filter.filter import PRESETS
from ppldm.training.commands.train import read_recipe

LDM, WIDTHS = "ldm-32layer-laion400m", [320, 640, 1280, 1280]
LAION, SCRATCH, SD2 = "sd20-base-to-21-base-laion", "sd15-unet-from-scratch", "sd2-base-256"
MICRO = "micro-diffusion-256-masked"
RATIOS = ["1/1", "1/2", "1/3", "2/3", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "9/16"]

# (document, reader, of what, {key: value}).
STATED = [
    ("004", "script", "trainer", {"run.per_device_train_batch_size": 8, "run.gradient_accumulation_steps": 1,
                                  "optimizer.learning_rate": 5e-5, "optimizer.weight_decay": 0.0, "run.seed": 42,
                                  "optimizer.lr_scheduler_type": "constant", "optimizer.warmup_steps": 0,
                                  "run.save_steps": 500, "logging.logging_steps": 500, "data.caption_drop": 0.1,
                                  "model.model_max_length": 77, "data.resolution": 256, "model.noise_offset": 0.0,
                                  "model.prediction_type": "epsilon", "validation.image_logging_steps": 1000,
                                  "data.crop_fraction": 0.9, "data.interpolation": "lanczos", "data.random_crop": True,
                                  "data.num_records": 10_000_000, "data.buffer_size": 100,
                                  "data.shuffle_every_n_samples": 5, "optimizer.ema_decay": 0.9999,
                                  "data.file_list": "./data/filelist/train.filelist.list"}),
    ("004", "script", "no_trainer", {"run.per_device_train_batch_size": 6, "run.gradient_accumulation_steps": 10,
                                     "optimizer.learning_rate": 5e-5, "optimizer.weight_decay": 0.01, "run.seed": 23,
                                     "optimizer.adam_beta1": 0.9, "optimizer.adam_beta2": 0.999,
                                     "optimizer.adam_epsilon": 1e-8, "optimizer.max_grad_norm": -1.0,
                                     "run.num_train_epochs": 100.0, "run.save_steps": 5000, "logging.logging_steps": 50,
                                     "compute.dataloader_num_workers": 6, "run.output_dir": "./output-model"}),
    ("004", "preset", LDM, {"optimizer.learning_rate": 4.6875e-5, "optimizer.weight_decay": 0.02,
                            "run.per_device_train_batch_size": 6, "run.gradient_accumulation_steps": 10,
                            "run.max_steps": 1_000_000_000, "run.save_steps": 5000, "run.save_total_limit": 50,
                            "logging.logging_steps": 50, "run.seed": 23, "validation.num_inference_steps": 200,
                            "model.tokenizer_name": "bert-base-uncased"}),
    ("004", "network", "text_encoder ldmbert", {"encoder_layers": 32, "d_model": 1280, "encoder_ffn_dim": 5120,
                                                "encoder_attention_heads": 8, "head_dim": 64, "vocab_size": 30522,
                                                "init_std": 0.02}),
    ("004", "network", "text_encoder ldmbert_12", {"encoder_layers": 12, "d_model": 768, "encoder_ffn_dim": 3072}),
    ("004", "network", "unet unet", {"block_out_channels": WIDTHS, "cross_attention_dim": 1280, "norm_eps": 1e-5,
                                     "attention_head_dim": 8, "sample_size": 32}),
    ("004", "network", "vae vae_kl_f8", {"latent_channels": 4, "scaling_factor": 0.18215}),
    ("004", "class", "diffusion.process:NoiseSchedule", {"num_train_timesteps": 1000, "beta_start": 0.00085,
                                                         "beta_end": 0.012, "beta_schedule": "scaled_linear"}),
    ("000", "filter", "laion2b-en", {"min_width": 512, "min_height": 512, "max_punsafe": 0.98, "min_aesthetic": 4.5}),
    ("000", "filter", "laion-art", {"min_width": 512, "min_height": 512, "language": "en"}),
    ("000", "command", "download", {"image_size": 512, "timeout": 10, "processes_count": 16, "thread_count": 64,
                                    "output_format": "files", "number_sample_per_shard": 10000, "retries": 0}),
    ("000", "preset", LAION, {"optimizer.learning_rate": 1e-5, "optimizer.warmup_steps": 10000, "run.seed": 3407,
                              "optimizer.adam_beta2": 0.98, "optimizer.weight_decay": 0.01, "data.resolution": 512,
                              "optimizer.use_ema": True}),
    ("001", "preset", SCRATCH, {"run.per_device_train_batch_size": 32, "run.gradient_accumulation_steps": 1,
                                "compute.dataloader_num_workers": 6, "run.save_steps": 2000, "run.save_total_limit": 1,
                                "optimizer.learning_rate": 1e-4, "optimizer.adam_beta1": 0.9,
                                "optimizer.adam_beta2": 0.98, "optimizer.weight_decay": 0.01,
                                "optimizer.adam_epsilon": 1e-8, "optimizer.warmup_steps": 500, "compute.bf16": True,
                                "data.resolution": 512, "data.where": "pwatermark<=0.5", "logging.logging_steps": 40}),
    ("001", "preset", "sd15-imagenet", {"run.max_samples": 110_000_000, "run.per_device_train_batch_size": 16,
                                        "run.save_steps": 1000}),
    ("001", "preset", SD2, {"run.max_samples": 2_000_000_000, "optimizer.warmup_steps": 10000, "data.resolution": 256,
                            "data.where": "punsafe<=0.1", "optimizer.ema_decay": 0.995}),
    ("001", "network", "unet unet_sd2", {"attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024}),
    ("001", "import", "open-diffusion", {"data.caption_drop": 0.0, "run.save_steps": 1000, "run.save_at": [0]}),
    ("002", "preset", "cascade-c-3b", {"optimizer.learning_rate": 1e-4, "optimizer.warmup_steps": 1,
                                       "data.resolution": 768, "data.bucket_ratios": RATIOS,
                                       "optimizer.ema_start_iters": 5000, "optimizer.ema_iters": 100,
                                       "optimizer.ema_beta": 0.9, "run.max_steps": 100_000, "run.save_steps": 2000,
                                       "run.backup_every": 20000, "data.caption_drop": 0.05,
                                       "optimizer.max_grad_norm": 1.0, "validation.num_inference_steps": 20}),
    ("002", "preset", "cascade-c-1b", {"run.max_steps": 10000, "data.buckets": "off", "model.loss_weighting": "p2"}),
    ("002", "preset", "cascade-b-3b", {"data.resolution": 1024, "run.save_steps": 1000, "run.backup_every": 20000}),
    ("002", "preset", "cascade-c-lora", {"model.lora_rank": 4, "model.lora_alpha": 1.0, "run.save_steps": 100,
                                         "run.backup_every": 1000, "run.max_steps": 10000}),
    ("002", "preset", "cascade-c-controlnet", {"model.controlnet_blocks": [0, 4, 8, 12, 51, 55, 59, 63],
                                               "run.max_steps": 10000, "run.backup_every": 2000}),
    ("002", "preset", "cascade-c-controlnet-inpainting", {"model.noise_offset": 0.1, "run.max_steps": 10000,
                                                          "run.backup_every": 2000, "model.control": "inpainting",
                                                          "model.controlnet_bottleneck": "effnet"}),
    ("002", "preset", "cascade-c-controlnet-super-resolution", {
        "model.noise_offset": 0.1, "run.max_steps": 30000, "run.backup_every": 5000,
        "model.control": "super-resolution,scale=0.5", "model.controlnet_bottleneck": "large"}),
    ("002", "class", "data.control:Canny", {"low": 100, "high": 200, "resize": 224}),
    ("002", "class", "data.control:Inpainting", {"threshold_low": 0.04, "threshold_high": 0.4, "p_outpaint": 0.4}),
    ("002", "class", "methods.averages.ema_interval:IntervalDecay", {"start_iters": 5000, "iters": 100, "beta": 0.9}),
    ("002", "network", "cascade_prior cascade_c_3b", {"conditioning_dim": 2048, "num_attention_heads": [32, 32],
                                                      "down_num_layers_per_block": [8, 24]}),
    ("002", "network", "cascade_decoder cascade_b_3b", {"block_out_channels": WIDTHS,
                                                        "down_num_layers_per_block": [2, 6, 28, 6]}),
    ("002", "import", "Stable Cascade", {"data.caption_drop": 0.05, "optimizer.max_grad_norm": 1.0}),
    ("003", "preset", MICRO, {"model.vae_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
                              "model.text_encoder_name_or_path": "apple/DFN5B-CLIP-ViT-H-14-378",
                              "data.caption_drop": 0.1, "data.interpolation": "bicubic", "model.patch_masking": 0.75,
                              "optimizer.learning_rate": 2.4e-4, "optimizer.weight_decay": 0.1, "run.seed": 18,
                              "optimizer.max_grad_norm": 0.25, "optimizer.warmup_steps": 2500,
                              "run.max_steps": 250_000}),
    ("003", "preset", "micro-diffusion-512-masked", {"optimizer.ema_beta": 0.99975, "optimizer.max_grad_norm": 0.5,
                                                     "run.per_device_train_batch_size": 32, "run.max_steps": 50000}),
    ("003", "preset", "micro-diffusion-512", {"optimizer.ema_beta": 0.9975, "run.save_steps": 500}),
]  # fmt: skip


@cache
def trained(name: str, loop: bool = True) -> dict:
    """The settings of a training by a preset, or by a script of the LDM example that is told nothing more."""
    told = ["data.file_list=x"] * (not name.startswith("ldm"))
    told += ["model.effnet_name_or_path=owner/model"] * name.startswith("cascade")
    return tree_of(read_recipe(["--preset", name, "--do_train", *told], loop, config=None))


@cache
def scripted(name: str) -> dict:
    from ppldm.families.ldm import LdmConfig

    needed = ["--output_dir", "x", "--do_train"] if name == "trainer" else []
    return tree_of(read_recipe(needed, name == "no_trainer", LdmConfig))


def value_in(tree: dict, key: str):
    section, name = key.split(".")
    return tree[section][name]


READ = {
    "preset": lambda name, key: value_in(trained(name), key),
    "script": lambda name, key: value_in(scripted(name), key),
    "network": lambda name, key: read_new_config(*name.split(), "")[key],
    "filter": lambda name, key: PRESETS[name][key],
    "command": lambda _name, key: inspect.signature(download).parameters[key].default,
    "class": lambda name, key: attrgetter(key)(resolve_name(f"ppldm.{name}")()),
    "import": lambda name, key: UNSAID[name][key],
}


@pytest.mark.parametrize("document, reader, name, values", STATED, ids=lambda one: one if isinstance(one, str) else "")
def test_defaults_are_those_of_the_document(document, reader, name, values):
    assert {key: READ[reader](name, key) for key in values} == values, document
