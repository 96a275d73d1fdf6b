"""Is doctor's estimate of memory true?  python benchmarks/memory.py [--cases NAME ...] [--json [OUT]]

Each case is one run of three updates, a checkpoint and an export by `ppldm train`, whose peak the system knows, beside
what `ppldm doctor` said of the same flags before. Pictures and networks are made here. The case `12` is the published
model of 12 layers, which takes 18 GB; `12-text` its text encoder over a tiny UNet, `12-unet` its UNet, half as wide.
From `plain` on, networks of some 80 M parameters are trained in different ways.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import train_step
from results import add_result_flags, save_results

NETWORKS = Path(__file__).resolve().parents[1] / "ppldm" / "config" / "networks"
MOST = 0.15  # of the measured peak
POSTHOC = {"ema_posthoc": "0.05 0.10"}
RANKS = {"devices": "0,1", "use_ema": "true"}
LDM = {"text_encoder_config_file": "ldmbert_tiny", "unet_config_file": "unet_tiny", "resolution": 128}
TWELVE = LDM | {"text_encoder_config_file": "ldmbert_12"}
HALF = LDM | {"unet_config_file": ("unet_12", {"block_out_channels": [160, 320, 640, 640]})}
WIDE = LDM | {"unet_config_file": ("unet_12", {"block_out_channels": [96, 192, 384, 384]})}
BASE = {"model_name_or_path": "plain/pipeline", "resolution": 128}  # on what the case `plain` exports
CAPTIONS = {"text_encoder_config_file": "clip_tiny", "train_text_encoder": "true", "resolution": 128}
UVIT = CAPTIONS | {"family": "uvit", "transformer_config_file": ("uvit_s2", {"clip_dim": 128, "num_text_tokens": 12})}
DIT = CAPTIONS | {"family": "dit", "transformer_config_file": ("dit_tiny", {
    "attention_head_dim": 64, "num_attention_heads": 8, "num_layers": 16, "cross_attention_dim": 512,
})}  # fmt: skip
AUTOENCODER = {"family": "autoencoder", "vae_config_file": "vae_kl_f8", "resolution": 64}
# Flags; of a network's config as a pair, what is other than in the config of that name.
CASES = {
    "tiny": LDM | {"resolution": 64},
    "tiny-large-batch": LDM | {"per_device_train_batch_size": 16},
    "tiny-256": LDM | {"resolution": 256},
    "tiny-256-recompute": LDM | {"resolution": 256, "recompute": "true"},
    "tiny-ema": LDM | {"resolution": 64, "use_ema": "true"},
    "tiny-workers": LDM | {"dataloader_num_workers": 2},
    "middle": LDM | {"text_encoder_config_file": "ldmbert_middle", "unet_config_file": "unet_middle"},
    "12-text": TWELVE | {"resolution": 64},
    "12-text-recompute": TWELVE | {"resolution": 64, "recompute": "true"},
    "12-unet": HALF,
    "12-unet-recompute": HALF | {"recompute": "true"},
    "12": TWELVE | {"unet_config_file": "unet_12", "resolution": 48},
    "plain": WIDE,
    "average": WIDE | {"use_ema": "true"},
    "posthoc": WIDE | POSTHOC,
    "posthoc-average": WIDE | POSTHOC | {"use_ema": "true", "ema_posthoc_dtype": "float32"},
    "accumulation": WIDE | {"gradient_accumulation_steps": 3},
    "recompute": WIDE | {"resolution": 256, "recompute": "true"},
    "large-batch": WIDE | {"per_device_train_batch_size": 16},
    "cached-latents": WIDE | {"latents": "cached", "random_crop": "false"},
    "sharding": WIDE | {"sharding": "stage1"},
    "ranks": WIDE | RANKS,
    "ranks-stage2": WIDE | RANKS | {"sharding": "stage2"},
    "ranks-stage3": WIDE | RANKS | {"sharding": "stage3"},
    "adapters": BASE | {"lora_rank": 16},
    "adapters-posthoc": BASE | POSTHOC | {"lora_rank": 16, "export_merged": "true"},
    "controlnet": BASE | {"family": "controlnet", "control": "canny"},
    "uvit-posthoc": UVIT | POSTHOC,
    "dit-average": DIT | {"use_ema": "true"},
    "autoencoder": AUTOENCODER,
    "autoencoder-posthoc": AUTOENCODER | POSTHOC,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "12"])
    add_result_flags(parser, "memory")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        train_step.prepare(Path(folder), argparse.Namespace(rows=64))
        for name in arguments.cases:
            results[name] = one = compare(Path(folder), name)
            sys.stdout.write(
                f"{name:<20} estimated {one['estimated_gb']:6.2f} GB, measured {one['measured_gb']:6.2f} GB, "
                f"{one['error']:+.1%}\n"
            )
            sys.stdout.flush()
            save_results(arguments, results)
    if any(abs(one["error"]) > MOST for one in results.values()):
        sys.exit(f"an estimate is off by more than {MOST:.0%}")


def compare(folder: Path, name: str) -> dict:
    """estimated_gb, measured_gb, error (the estimate by the measured peak, less 1), purposes in bytes."""
    flags = flags_of(folder, name)
    if "model_name_or_path" in CASES[name] and not (folder / "plain").is_dir():
        peak_of_training(flags_of(folder, "plain"))
    if CASES[name].get("latents"):
        resolution = str(CASES[name]["resolution"])
        run("precompute", str(folder / "train.filelist"), "--vae", str(folder / "vae"), "--resolutions", resolution)
    said = json.loads(run("doctor", "--json", *flags))
    measured, estimated = peak_of_training(flags) / 1e9, sum(said["memory"].values()) / 1e9
    if name != "plain":
        shutil.rmtree(folder / name)
    return {"estimated_gb": estimated, "measured_gb": measured, "error": estimated / measured - 1,
            "purposes": said["memory"]}  # fmt: skip


def flags_of(folder: Path, name: str) -> list[str]:
    """The words of a case, with the configs of its networks in `folder`."""
    changes = dict(CASES[name])
    settings = {
        "output_dir": folder / name, "file_list": folder / "train.filelist", "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1, "max_steps": 3, "logging_steps": 1, "dataloader_num_workers": 0,
        "image_logging_steps": 0, "report_to": "none",
    }  # fmt: skip
    family = changes.pop("family", "ldm")
    settings["config"] = _write(folder / f"{name}.yaml", f"family: {family}\n")
    if family != "autoencoder":
        settings["model_max_length"] = train_step.MAX_LENGTH
    if base := changes.pop("model_name_or_path", None):
        settings["model_name_or_path"] = folder / base
    elif family != "autoencoder":
        settings |= {"vae_name_or_path": folder / "vae", "tokenizer_name": folder / "tokenizer"}
    for flag in {"unet_config_file", "transformer_config_file"} & changes.keys():
        network, others = changes[flag] if isinstance(changes[flag], tuple) else (changes[flag], {})
        if flag == "unet_config_file":
            channels = dict.fromkeys(("in_channels", "out_channels"), _config("vae_tiny")["latent_channels"])
            width = _config(changes["text_encoder_config_file"])["d_model"]
            others = others | channels | {"cross_attention_dim": width}
        changes[flag] = _write(folder / f"{name}.json", json.dumps(_config(network) | others))
    return [word for flag, value in (settings | changes).items() for word in (f"--{flag}", *str(value).split())]


def _config(name: str) -> dict:
    return json.loads((NETWORKS / f"{name}.json").read_text())


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def peak_of_training(flags: list[str]) -> int:
    """Bytes that the process had resident at its peak, from its first to its last moment."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, "-m", "ppldm", "train", *flags], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            log.seek(0)
            sys.exit(f"train failed:\n{log.read()}")
    return usage.ru_maxrss * 1024


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "ppldm", *words], capture_output=True, text=True)
    if done.returncode and not done.stdout:
        sys.exit(f"{' '.join(words[:1])} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
