"""A short training, and the same from the checkpoint in its middle: the same losses and weights, to the bit?

Pictures of the shapes world, a small model from scratch, by `ppldm train` in processes of its own.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import paddle

from ...demo.shapes_world.write import World, make_shapes_world
from ...networks.build import build_autoencoder, save_component
from ...training.monitor.metrics import read_metrics
from ...utils.errors import TrainingError
from ...utils.stages import as_flags
from ...weights.checkpoint_names import checkpoint_name

STEPS, MIDDLE = 4, 2
ROWS = 24


def try_resume(device: str) -> dict:
    """Losses of the updates after the middle, without and with a stop, and whether losses and weights are equal. Raises
    TrainingError where a training fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shapes_world(folder / "data", World(32, seed=1), ROWS)
        save_component(build_autoencoder("vae_tiny", 0), folder / "vae")
        flags = as_flags(
            device=device, vae_name_or_path=folder / "vae", text_encoder_config_file="ldmbert_tiny",
            unet_config_file="unet_tiny", tokenizer_name=folder / "data/tokenizer", model_max_length=12,
            file_list=folder / "data/demo.filelist.list", resolution=32, max_steps=STEPS, save_steps=MIDDLE,
            logging_steps=1, train_batch_size=2, gradient_accumulation_steps=1, num_workers=0, image_logging_steps=0,
            report_to="none", seed=3,
        )  # fmt: skip
        _train(flags, folder / "whole")
        shutil.copytree(folder / "whole" / checkpoint_name(MIDDLE), folder / "again" / checkpoint_name(MIDDLE))
        _train(flags, folder / "again")
        losses = [_losses(folder / run) for run in ("whole", "again")]
        weights = [_weights(folder / run) for run in ("whole", "again")]
    equal = losses[0] == losses[1] and len(losses[0]) == STEPS - MIDDLE and weights[0].keys() == weights[1].keys()
    different = [name for name in weights[0] if equal and not np.array_equal(weights[0][name], weights[1][name])]
    return {"losses": losses[0], "resumed": losses[1], "different_weights": different, "equal": equal and not different}


def _train(flags: tuple[str, ...], output: Path) -> None:
    command = [sys.executable, "-m", "ppldm", "train", *flags, "--output_dir", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"the short training failed: {done.stderr.strip().splitlines()[-1]}")


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if record["global_step"] > MIDDLE]


def _weights(run: Path) -> dict[str, np.ndarray]:
    state = paddle.load(str(run / checkpoint_name(STEPS) / "model_state.pdparams"), return_numpy=True)
    return {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
