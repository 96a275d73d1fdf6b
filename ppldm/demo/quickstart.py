"""`ppldm quickstart`: from nothing to pictures: demo data, a latent diffusion model, a grid of samples. The autoencoder
comes with the package, unless it is to be trained too.

run_scripts/quickstart.sh makes the environment first and then runs this module. Showing help, checking flags and a dry
run need only Python, since nothing may be installed yet: what needs more is imported where it is used.
"""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from ..config.option import flag_formatter, parse_known_or_suggest
from ..utils.errors import ConfigError, exit_on_error
from ..utils.stages import Stage, command, describe, drawing_stages, run_stages, seconds_per_update, tell, train_command
from ..weights.folders import share_trained

STEPS, AUTOENCODER_STEPS = 1200, 2000
# Preset, loop, global batch, updates between samples.
_TRAININGS = {
    "autoencoder": ("autoencoder-tiny-cpu", "hand", 4, 500),
    "diffusion": ("ldm-tiny-cpu", "trainer", 16, 200),
}
_EPILOG = """In a clone, `bash run_scripts/quickstart.sh` makes the environment first and takes the same flags; its
folder is quickstart/ of the clone. Its environment variables: PYTHON (the interpreter, 3.10 to 3.13), PPLDM_VENV (the
virtual environment, .venv without it)."""


def quickstart(argv: list[str]) -> None:
    """Train a small model on demo data in three to five minutes, or on your own pictures, and draw with it."""
    arguments = parse_known_or_suggest(make_parser(), argv)
    processes = arguments.processes
    # Of pictures of one's own a folder of their name, so that the demo's models stay.
    folder = Path(arguments.pictures or "quickstart").expanduser()
    own = f"{folder.resolve().name}-model" if arguments.pictures else folder
    out = Path(arguments.out or own).absolute()
    arguments.train_autoencoder |= arguments.autoencoder_steps is not None
    if arguments.pictures:
        from .own_pictures import plan_pictures

        names = ("steps", "autoencoder_steps", "resolution", "train_autoencoder")
        wishes = {name: getattr(arguments, name) for name in names}
        stages, lines = plan_pictures(arguments.pictures, out, processes, not arguments.dry_run, **wishes)
        for line in lines:
            tell(line)
    elif arguments.resolution:
        raise ConfigError("--resolution is for --pictures; add the folder of pictures, or omit it")
    else:
        autoencoder_steps = (arguments.autoencoder_steps or AUTOENCODER_STEPS) if arguments.train_autoencoder else 0
        stages = plan(out, arguments.steps or STEPS, autoencoder_steps, processes)
    if arguments.dry_run:
        sys.stdout.write(describe(stages, out))
        return
    run_stages(stages, out)
    tell(f"the pictures: {out}/pictures/grid.png (every prompt), {out}/pictures/loss.png (the loss curve)")
    for line in [*next_commands(out), *describe_further(stages)]:
        tell(line)


quickstart.takes_words = True


def next_commands(out: Path) -> list[str]:
    """What may be typed next: a prompt, of the demo one that was in no caption, and two pages."""
    prompts = next(path for path in (out / "prompts.txt", out / "data/prompts.txt") if path.is_file())
    prompt = prompts.read_text(encoding="utf-8").splitlines()[-1].partition("\t")[0]
    own = shlex.quote(str(out))
    return [
        f"draw more: ppldm generate --model {own} --prompt {shlex.quote(prompt)}",
        f"draw on a page: ppldm app --model {own}",
        f"look at the training on a page: ppldm watch {own}",
    ]


def describe_further(stages: list[Stage]) -> list[str]:
    """What may be typed to train the drawing model to twice its updates, in as many processes."""
    ((words, updates),) = ((stage.command, stage.updates) for stage in stages if stage.name == "diffusion")
    ranks = int(words[words.index("--nproc_per_node") + 1]) if "--nproc_per_node" in words else 1
    if "--max_steps" in words:
        words = words[: (place := words.index("--max_steps"))] + words[place + 2 :]
    further = words[words.index("train") :] + ("--devices", ",".join(map(str, range(ranks)))) * (ranks > 1)
    further += ("--max_steps", str(2 * updates), "--accept_changes", "max_steps")
    told = f"train further, to {2 * updates} updates in all (the loss may rise at first; grid.png stays as it is)"
    return [f"{told}: ppldm {shlex.join(further)}"]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppldm quickstart",
        description="Draws captioned pictures, trains a small text-to-image model on them, and draws what it makes of "
        "a list of prompts. On 2 idle cores the first pictures that can be recognised come within two minutes, the end "
        "after three to five. Stopped at any point, the same command goes on from what is finished. With --pictures it "
        "does so with your own: captions are taken from a table in the folder (metadata.csv, .tsv, .jsonl, .parquet; a "
        "first line says file_name,text), from text files beside the pictures, or from their names (red_car_03.jpg); "
        "its recipes lie in OUT, to be changed.",
        epilog=_EPILOG,
        formatter_class=flag_formatter(),
    )
    parser.add_argument("--pictures", type=_folder, metavar="FOLDER",
                        help="the pictures of a folder and below it (default: the demo's drawings)")  # fmt: skip
    parser.add_argument("--steps", type=_positive, metavar="N",
                        help=f"updates of the text-to-image model (default: {STEPS}; with --pictures by their "
                        "number)")  # fmt: skip
    parser.add_argument("--resolution", type=_positive, metavar="N",
                        help="side that --pictures are trained at, in pixels, a multiple of 16 (default: 64, or 48 or "
                        "32 where they are small)")  # fmt: skip
    parser.add_argument("--train-autoencoder", "--train_autoencoder", action="store_true",
                        help="train an autoencoder too, 6 minutes more, and do not take the one that comes with ppldm "
                        "(which is trained in any case where it would blur your --pictures)")  # fmt: skip
    parser.add_argument("--autoencoder-steps", "--autoencoder_steps", type=_positive, metavar="N",
                        help=f"the same for N updates (default: {AUTOENCODER_STEPS}; of --pictures 800)")  # fmt: skip
    parser.add_argument("--out", type=_folder, metavar="DIR",
                        help="where data, models and pictures go (default: quickstart; with --pictures cats: "
                        "cats-model)")  # fmt: skip
    parser.add_argument("--processes", type=_positive, metavar="N", default=1,
                        help="processes that train together, 1, 2 or 4 (default: 1, which is fastest for networks this "
                        "small)")  # fmt: skip
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print the commands and run none")
    return parser


def plan(out: Path, steps: int, autoencoder_steps: int, processes: int) -> list[Stage]:
    """The stages data, autoencoder where it has steps, diffusion, pictures and curve, which resume by themselves."""
    if processes not in (1, 2, 4):
        raise ConfigError(f"--processes {processes}: the autoencoder's batch of 4 wants 1, 2 or 4")
    prompts = out / "data/prompts.txt"

    def train(name: str, title: str, updates: int, filelist: str, **flags) -> Stage:
        preset, loop, batch, every = _TRAININGS[name]
        own = {"preset": preset, "loop": loop, "output_dir": out / name, "file_list": out / "data" / filelist, **flags}
        own |= {"per_device_train_batch_size": batch // processes, "max_steps": updates}
        words, done = train_command(processes, out / "log" / name, **own), partial(share_trained, out / name, updates)
        seconds = 20 + seconds_per_update(preset) * updates
        what = f"training the {title}, {updates} updates, samples every {every}"
        return Stage(name, what, words, seconds, done, (), updates)

    data = command("demo-data", out=out / "data", subset="quickstart", size=48)
    stages, vae = [Stage("data", "drawing captioned pictures", data, 2)], {}
    if autoencoder_steps:  # without captions, it may see the pictures that the other model never does
        stages.append(train("autoencoder", "autoencoder", autoencoder_steps, "autoencoder.filelist.list"))
        vae = {"vae_name_or_path": out / "autoencoder/vae"}
    texts = {"tokenizer_name": out / "data/tokenizer", "validation_prompts": prompts}
    stages.append(train("diffusion", "text-to-image model", steps, "demo.filelist.list", **vae, **texts))
    return [*stages, *drawing_stages(out, prompts, "drawing pictures for the prompts")]


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
