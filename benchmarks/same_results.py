"""Does another commit give the same results, to the bit:  python benchmarks/same_results.py COMMIT [--json [OUT]]

Runs the same command lines with the code of COMMIT and with this one, each as a user would: demo data, an autoencoder,
the text-to-image model by the hand-written loop (resumed once), by the Trainer, on two ranks, with every switch of the
objective, pictures from the exported pipeline, and pictures converted to part files. Then compares all that decides:
the bytes of parts and indexes, losses, gradient norms and rates of every update, weights, averages and optimizer state
of every checkpoint, exported weights, pixels of all pictures. What says how long something took is left out.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import paddle
from PIL import Image
from results import ROOT, add_result_flags, export_commit, save_results

# Numbers of metrics.jsonl that are of the machine.
_OF_THE_MACHINE = ("_per_second", "_share", "_cost", "peak_", "time")
_TENSORS = ("model_state.pdparams", "ema_state.pdparams", "optimizer.pdopt", "scheduler.pdparams")


def command_lines(out: Path) -> dict[str, list[str]]:
    """Name -> command, each with the code of its working directory; later ones use what earlier ones made."""
    data, size = out / "data", ["--resolution", "48", "--crop_fraction", "1.0", "--random_crop", "false"]
    every = ["--logging_steps", "1", "--image_logging_steps", "6", "--save_steps", "4"]
    networks = [
        *("--vae_name_or_path", out / "autoencoder/vae", "--tokenizer_name", data / "tokenizer"),
        *("--text_encoder_config_file", "examples/config/ldmbert_tiny.json"),
        *("--unet_config_file", "examples/config/unet_tiny.json", "--model_max_length", "12"),
        *("--file_list", data / "demo.filelist.list", *size, *every, "--num_inference_steps", "4"),
        *("--learning_rate", "1e-3", "--dataloader_num_workers"),
    ]
    objective = [
        *("--prediction_type", "v_prediction", "--rescale_betas_zero_snr", "--snr_gamma", "5", "--noise_offset", "0.1"),
        *("--input_perturbation", "0.1", "--use_ema", "--random_flip", "--caption_drop", "0.3", "--scale_lr"),
        *("--unet_learning_rate", "2e-3", "--lr_scheduler_type", "cosine", "--warmup_steps", "2"),
        *("--max_grad_norm", "1.0", "--interpolation", "area"),
    ]
    loop, trainer = "examples/train_txt2img_laion400m_no_trainer.py", "examples/train_txt2img_laion400m_trainer.py"
    launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", out / "log"]
    of_four = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]

    def train(script: str, name: str, *flags, steps: int = 10, before=()) -> list:
        return [*before, script, "--output_dir", out / name, *networks, *flags, "--max_steps", str(steps)]

    commands = {
        "data": ["-m", "ppldm", "demo-data", "--out", data, "--subset", "quickstart", "--size", "48"],
        "autoencoder": [
            *("examples/train_autoencoder.py", "--output_dir", out / "autoencoder"),
            *("--file_list", data / "autoencoder.filelist.list", "--vae_config_file", "examples/config/vae_tiny.json"),
            *(*size, *every, "--max_steps", "10", "--reconstruction_loss", "l1_mse", "--dataloader_num_workers", "0"),
        ],
        "loop": train(loop, "loop", "0", *of_four, "--lr_scheduler_type", "constant", steps=6),
        "loop, resumed": train(loop, "loop", "2", *of_four, "--lr_scheduler_type", "constant"),
        "loop, every switch": train(loop, "switches", "1", *of_four, *objective),
        "Trainer": train(trainer, "trainer", "0", "--do_train", *of_four, *objective),
        "two ranks": train(trainer, "ranks", "0", "--do_train", *of_four, "--sharding", "stage1", before=launch),
    }
    pictures = ["-m", "ppldm", "generate", "--prompts", data / "prompts.txt", "--num-inference-steps", "5"]
    commands |= {
        f"pictures, {name}": [*pictures, "--model", out / name / "pipeline", "--out", out / f"pictures-{name}"]
        for name in ("loop", "switches")
    }
    return {name: [str(word) for word in words] for name, words in commands.items()}


def results_of(tree: Path, out: Path) -> dict[str, str]:
    """Run all command lines with the code of `tree`; each result by its name under `out`, as a digest."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    for name, words in command_lines(out).items():
        done = subprocess.run([sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}, code of {tree}: status {done.returncode}\n{done.stderr[-3000:]}")
    return {
        str(path.relative_to(out)): digest
        for path in sorted(out.rglob("*"))
        if path.is_file() and (digest := digest_of(path)) is not None
    }


def digest_of(path: Path) -> str | None:
    """Of what a file says, whatever its format does not fix; None of a file that is no result."""
    if path.name in _TENSORS:
        return _digest(_plain(paddle.load(str(path), return_numpy=True)))
    if path.name == "metrics.jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return _digest([{k: v for k, v in line.items() if not any(w in k for w in _OF_THE_MACHINE)} for line in lines])
    if path.suffix == ".png":
        return _digest(Image.open(path).convert("RGB").tobytes())
    if path.suffix in (".gz", ".idx", ".columns", ".safetensors"):
        return _digest(path.read_bytes())
    return None


def _plain(value):
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in sorted(value.items(), key=lambda item: str(item[0]))}
    return f"{value.dtype}{value.shape}{_digest(value.tobytes())}" if hasattr(value, "tobytes") else repr(value)


def _digest(value) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=repr).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    """Compare, print, exit with status 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what to compare with")
    add_result_flags(parser, "same_results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as top:
        tree = export_commit(arguments.commit, Path(top, "tree"))
        # One folder after the other under one name: paths are part of what runs record.
        out, kept = Path(top, "out"), {}
        for name, code in (("before", tree), ("now", ROOT)):
            kept[name] = results_of(code, out)
            out.rename(Path(top, name))
    names = sorted(kept["before"].keys() | kept["now"].keys())
    differing = [name for name in names if kept["before"].get(name) != kept["now"].get(name)]
    for name in differing:
        sys.stdout.write(f"differs: {name} (before {kept['before'].get(name)}, now {kept['now'].get(name)})\n")
    sys.stdout.write(f"{len(names) - len(differing)} of {len(names)} results equal those of {arguments.commit}\n")
    save_results(arguments, {"commit": arguments.commit, "equal": len(names) - len(differing), "differing": differing})
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
