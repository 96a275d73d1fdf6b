"""`ppldm quickstart`: from nothing to pictures: demo data, an autoencoder, a latent diffusion model, a grid of samples.

run_scripts/quickstart.sh makes the environment first and then runs this module. Showing help, checking flags and a dry
run need Python alone, since nothing may be installed yet: what needs more is imported where it is used.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from ..config.flags import parse_known_or_suggest
from ..utils.errors import ConfigError, exit_on_error
from ..utils.machine.devices import installed_kind
from ..utils.machine.resources import count_usable_cores
from ..utils.stages import Stage, as_flags, describe, run_stages, tell
from ..weights.checkpoint_names import share_trained

_EPILOG = """In a clone, `bash run_scripts/quickstart.sh` makes the environment first and takes the same flags; its
folder is quickstart/ of the clone. Its environment variables: PYTHON (the interpreter, 3.10 to 3.12), PPLDM_VENV (the
virtual environment, .venv without it)."""


def quickstart(argv: list[str]) -> None:
    """Train a small model on demo data and draw pictures with it: 15 minutes on two cores."""
    arguments = parse_known_or_suggest(make_parser(), argv)
    out = Path(arguments.out).absolute()
    processes = arguments.processes or count_processes()
    stages = plan(out, arguments.steps, arguments.autoencoder_steps, processes)
    if arguments.dry_run:
        sys.stdout.write(describe(stages))
        return
    run_stages(stages, out)
    tell(f"the pictures: {out}/pictures/grid.png (every prompt), {out}/pictures/loss.png (the loss curve)")
    tell(f"the runs' curves and samples: {Path(sys.executable).parent}/visualdl --logdir {out} --language en")


quickstart.takes_words = True


def make_parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    parser = argparse.ArgumentParser(
        prog="ppldm quickstart",
        description="Draws captioned pictures, trains a small autoencoder and a small text-to-image model on them, and "
        "draws what the model makes of a list of prompts. On 2 cores it takes about 15 minutes. Stopped at any point, "
        "the same command goes on from what is finished.",
        epilog=_EPILOG,
    )
    parser.add_argument("--steps", type=_positive, default=1400, metavar="N",
                        help="updates of the text-to-image model (default: 1400)")  # fmt: skip
    parser.add_argument("--autoencoder-steps", "--autoencoder_steps", type=_positive, default=2000, metavar="N",
                        help="updates of the autoencoder (default: 2000)")  # fmt: skip
    parser.add_argument("--out", type=_folder, default="quickstart", metavar="DIR",
                        help="where data, models and pictures go (default: quickstart)")  # fmt: skip
    parser.add_argument("--processes", type=_positive, metavar="N",
                        help="processes that train together, 1, 2 or 4 (default: 1 on a GPU and the like, else 2 "
                        "where there are 2 cores)")  # fmt: skip
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print the commands and run none")
    return parser


def count_processes() -> int:
    """On a CPU small networks gain nothing from a second thread, but two processes train twice as fast as one; a GPU
    takes one process. The global batch is the same for both."""
    return min(2, count_usable_cores()) if installed_kind().is_cpu else 1


def plan(out: Path, steps: int, autoencoder_steps: int, processes: int) -> list[Stage]:
    """The five stages, each of which resumes by itself when the same command runs again. Raises ConfigError."""
    if processes not in (1, 2, 4):
        raise ConfigError(f"--processes {processes}: the autoencoder's batch of 4 wants 1, 2 or 4")
    ppldm = ("python", "-m", "ppldm")
    data = (*ppldm, "demo-data", *as_flags(out=out / "data", subset="quickstart", size=48))
    drawing = as_flags(
        model=out / "diffusion/pipeline",
        prompts=out / "data/prompts.txt",
        out=out / "pictures",
        num_samples=4,
        num_inference_steps=30,
    )
    generate = (*ppldm, "generate", *drawing)
    curve = (*ppldm, "plot-loss", f"{out}/diffusion", *as_flags(out=out / "pictures/loss.png"))
    autoencoder = autoencoder_command(out, autoencoder_steps, processes)
    diffusion = diffusion_command(out, steps, processes)
    return [
        Stage("data", "drawing captioned pictures", data, 8),
        Stage("autoencoder", f"training the autoencoder, {autoencoder_steps} updates", autoencoder,
              20 + 0.11 * autoencoder_steps, partial(share_trained, out / "autoencoder", autoencoder_steps)),
        Stage("diffusion", f"training the text-to-image model, {steps} updates", diffusion, 20 + 0.25 * steps,
              partial(share_trained, out / "diffusion", steps)),
        Stage("pictures", "drawing pictures for the prompts", generate, 25),
        Stage("curve", "drawing the loss curve", curve, 3),
    ]  # fmt: skip


def autoencoder_command(out: Path, steps: int, processes: int) -> tuple[str, ...]:
    """The autoencoder's training. Without captions, it may see the pictures that the other model never does."""
    flags = as_flags(
        output_dir=out / "autoencoder",
        file_list=out / "data/autoencoder.filelist.list",
        per_device_train_batch_size=4 // processes,
        max_steps=steps,
    )
    return train_command("autoencoder-tiny-cpu", "hand", flags, processes, out / "log/autoencoder")


def diffusion_command(out: Path, steps: int, processes: int) -> tuple[str, ...]:
    """The text-to-image model's training."""
    flags = as_flags(
        output_dir=out / "diffusion",
        file_list=out / "data/demo.filelist.list",
        vae_name_or_path=out / "autoencoder/vae",
        tokenizer_name=out / "data/tokenizer",
        validation_prompts=out / "data/prompts.txt",
        per_device_train_batch_size=16 // processes,
        max_steps=steps,
    )
    return train_command("ldm-tiny-cpu", "trainer", flags, processes, out / "log/diffusion")


def train_command(preset: str, loop: str, flags: list[str], processes: int, log: Path) -> tuple[str, ...]:
    """The command that trains, in one process or in several, whose logs lie in the folder `log`."""
    train = ("python", "-u", "-m", "ppldm", "train", "--preset", preset, "--loop", loop, *flags)
    if processes == 1:
        return train
    launch = ("-m", "ppldm.training.distributed.launch", "--nproc_per_node", str(processes), "--log_dir", str(log))
    return ("python", "-u", *launch, *train)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number of at least 1 is needed")
    return int(text)


def _folder(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder is needed")
    return text


if __name__ == "__main__":
    with exit_on_error():
        quickstart(sys.argv[1:])
