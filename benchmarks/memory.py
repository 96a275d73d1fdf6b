"""Is doctor's estimate of memory true?  python benchmarks/memory.py [--cases NAME ...] [--json [OUT]]

Each case is one run of three updates, a checkpoint and an export by `ppldm train`, whose peak the system knows, beside
what `ppldm doctor` said of the same flags before. Pictures and networks are made here. The case `12` is the published
model of 12 layers, which takes 18 GB; `12-text` its text encoder over a tiny UNet, `12-unet` its UNet, half as wide.
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
# Networks of text encoder and UNet, and further flags.
CASES = {
    "tiny": ("tiny", "tiny", {"resolution": 64}),
    "tiny-large-batch": ("tiny", "tiny", {"resolution": 128, "per_device_train_batch_size": 16}),
    "tiny-256": ("tiny", "tiny", {"resolution": 256}),
    "tiny-256-recompute": ("tiny", "tiny", {"resolution": 256, "recompute": "true"}),
    "tiny-ema": ("tiny", "tiny", {"resolution": 64, "use_ema": "true"}),
    "tiny-workers": ("tiny", "tiny", {"resolution": 128, "dataloader_num_workers": 2}),
    "middle": ("middle", "middle", {"resolution": 128}),
    "12-text": ("12", "tiny", {"resolution": 64}),
    "12-text-recompute": ("12", "tiny", {"resolution": 64, "recompute": "true"}),
    "12-unet": ("tiny", "12", {"resolution": 128}),
    "12-unet-recompute": ("tiny", "12", {"resolution": 128, "recompute": "true"}),
    "12": ("12", "12", {"resolution": 48}),
}
NARROWER = {"block_out_channels": [160, 320, 640, 640]}  # of "12-unet": half the channels


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
    text, unet, changes = CASES[name]
    config = json.loads((NETWORKS / f"unet_{unet}.json").read_text())
    config["cross_attention_dim"] = json.loads((NETWORKS / f"ldmbert_{text}.json").read_text())["d_model"]
    config |= NARROWER if name.startswith("12-unet") else {}
    (folder / f"{name}.json").write_text(json.dumps(config))
    settings = {
        "output_dir": folder / name, "file_list": folder / "train.filelist", "vae_name_or_path": folder / "vae",
        "text_encoder_config_file": f"ldmbert_{text}", "unet_config_file": folder / f"{name}.json",
        "tokenizer_name": folder / "tokenizer", "model_max_length": train_step.MAX_LENGTH,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 3, "logging_steps": 1,
        "dataloader_num_workers": 0, "image_logging_steps": 0, "report_to": "none", **changes,
    }  # fmt: skip
    flags = [word for flag, value in settings.items() for word in (f"--{flag}", str(value))]
    said = json.loads(run("doctor", "--json", *flags))
    measured, estimated = peak_of_training(flags) / 1e9, sum(said["memory"].values()) / 1e9
    shutil.rmtree(folder / name)
    return {"estimated_gb": estimated, "measured_gb": measured, "error": estimated / measured - 1,
            "purposes": said["memory"]}  # fmt: skip


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
