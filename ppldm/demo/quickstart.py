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
from ..utils.stages import Stage, as_flags, describe, in_processes, run_stages, tell
from ..weights.checkpoint_names import share_trained

_EPILOG = """In a clone, `bash run_scripts/quickstart.sh` makes the environment first and takes the same flags; its
folder is quickstart/ of the clone. Its environment variables: PYTHON (the interpreter, 3.10 to 3.12), PPLDM_VENV (the
virtual environment, .venv without it)."""


def quickstart(argv: list[str]) -> None:
    """Train a small model on demo data, or your own pictures, and draw with it: 15 minutes on two cores."""
    arguments = parse_known_or_suggest(make_parser(), argv)
    processes = arguments.processes or count_processes()
    out = _out_of(arguments)
    if arguments.pictures:
        from .own_pictures import describe_next, plan_pictures

        names = ("steps", "autoencoder_steps", "resolution", "train_autoencoder")
        wishes = {name: getattr(arguments, name) for name in names}
        stages, own = plan_pictures(arguments.pictures, out, processes, not arguments.dry_run, **wishes)
        for line in own:
            tell(line)
    elif arguments.resolution:
        raise ConfigError("--resolution is for --pictures; add the folder of pictures, or omit it")
    else:
        stages = plan(out, arguments.steps or 1400, arguments.autoencoder_steps, processes)
    if arguments.dry_run:
        sys.stdout.write(describe(stages))
        return
    run_stages(stages, out)
    tell(f"the pictures: {out}/pictures/grid.png (every prompt), {out}/pictures/loss.png (the loss curve)")
    for line in describe_next(out) if arguments.pictures else ():
        tell(line)
    tell(f"the runs' curves and samples: {Path(sys.executable).parent}/visualdl --logdir {out} --language en")


quickstart.takes_words = True


def _out_of(arguments) -> Path:
    """OUT, absolute; of pictures of one's own a folder of their name, so that the demo's models stay."""
    folder = Path(arguments.pictures or "quickstart").expanduser()
    own = f"{folder.resolve().name}-model" if arguments.pictures else folder
    return Path(arguments.out or own).absolute()


def make_parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    parser = argparse.ArgumentParser(
        prog="ppldm quickstart",
        description="Draws captioned pictures, trains a small autoencoder and a small text-to-image model on them, and "
        "draws what the model makes of a list of prompts. On 2 cores it takes about 15 minutes. Stopped at any point, "
        "the same command goes on from what is finished. With --pictures it does so with your own: captions are taken "
        "from a table in the folder (metadata.csv, .tsv, .jsonl, .parquet), from text files beside the pictures, or "
        "from their names (red_car_03.jpg); its recipes lie in OUT, to be changed.",
        epilog=_EPILOG,
    )
    parser.add_argument("--pictures", type=_folder, metavar="FOLDER",
                        help="the pictures of a folder and below it (default: the demo's drawings)")  # fmt: skip
    parser.add_argument("--steps", type=_positive, metavar="N",
                        help="updates of the text-to-image model (default: 1400; of many --pictures more)")  # fmt: skip
    parser.add_argument("--resolution", type=_positive, metavar="N",
                        help="side that --pictures are trained at, in pixels, a multiple of 16 (default: 64, or 48 or "
                        "32 where they are small)")  # fmt: skip
    parser.add_argument("--train-autoencoder", "--train_autoencoder", action="store_true",
                        help="train the autoencoder, even if the package's reproduces the pictures well")  # fmt: skip
    parser.add_argument("--autoencoder-steps", "--autoencoder_steps", type=_positive, default=2000, metavar="N",
                        help="updates of the autoencoder (default: 2000)")  # fmt: skip
    parser.add_argument("--out", type=_folder, metavar="DIR",
                        help="where data, models and pictures go (default: quickstart; of --pictures cats, "
                        "cats-model)")  # fmt: skip
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
    return in_processes(train, processes, log)


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
