"""`ppldm train` and the training scripts: one parser, made from the options; a recipe is checked before Paddle loads.

What can be refused at once is refused before that, which takes seconds: wrong flags, paths that are not there, configs
that no network can have. PaddleNLP's Trainer has many more flags than mean something here: those are taken at their
defaults, else refused. Nothing heavy is imported here.

With `--devices 0,1 --max_restarts 3` the command starts the ranks of its run itself, each the same command without
these flags. Paddle's launcher starts and watches them (`training/distributed/launch.py`), on this machine or as one of
several; `supervise` starts it again where it failed.
"""

import argparse
import importlib.util
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...config.load import file_layers, flag_layer, last_value, list_presets, override_layer, preset_path, where_of
from ...config.network_files import find_network_file
from ...config.option import Option, add_options, explain_unknown, flag_formatter, given_options, options, parse_known
from ...config.recipe import (
    SECTIONS,
    Recipe,
    defaults,
    idle_settings,
    merge_settings,
    naming_origins,
    recipe_of,
    schema_of,
    write_settings,
)
from ...data.filelist import list_of_folder, parts_of_folder
from ...data.text.tokenizer import check_tokenizer
from ...families.base import DEFAULT_FAMILY, check_family, get_family, list_families
from ...families.ldm import LdmConfig
from ...utils.entry import entry
from ...utils.errors import ConfigError, FilelistError, PpldmError
from ...utils.files import is_address
from ...utils.log import get_logger
from ...utils.machine.cpu import load_paddle
from ...utils.machine.devices import launch_arguments, launch_kind, parse_device
from ...utils.machine.resources import count_usable_cores
from ...utils.processes.ranks import World
from ...utils.text import count_of, did_you_mean
from ...utils.variables import all_variables, network_forbidden
from ...weights.fetch import check_name
from ...weights.folders import list_checkpoints, step_of
from ..metrics import check_reporters
from ..run_folder import LAUNCH_LOGS, find_job

LOOPS = ("hand", "trainer")  # the hand-written loop, PaddleNLP's Trainer: the same results
LAUNCHER = "ppldm.training.distributed.launch"
_OVERRIDE = re.compile(rf"(family|({'|'.join(SECTIONS)})\.[^=\s]*)=", re.ASCII)
# What neither script does, and why, where that was seen on PaddleNLP 3.0.0b4 and Paddle 3.3.1.
_NOT_SUPPORTED = {
    "unified_checkpoint": "works for PaddleNLP's own model classes only; checkpoints here hold the whole model for any "
    "number of ranks as they are",
    **dict.fromkeys(("amp_master_grad", "load_best_model_at_end", "do_eval", "do_predict"), "is not supported yet"),
}


def train(argv: list[str]):
    """Train a model by a preset, a config file, flags or all of them."""
    wanted, words = read_launch([with_underscores(word) for word in argv])
    given, rest = _read(words, lambda parser: parser.add_argument("--loop", choices=LOOPS, default="hand"))
    by_hand, prog = given.loop == "hand", "ppldm train [--loop hand|trainer]"
    rest = rest if by_hand else ["--do_train", *rest]
    if is_wanted(wanted) and not read_dry_run(rest):
        launch(wanted, words, check_early(rest, by_hand, None, prog))
    elif wanted.devices and "--num_devices" not in {word.partition("=")[0] for word in rest}:
        rest = [*rest, "--num_devices", str(count_devices(wanted))]
    run_training(rest, loop=by_hand, config=None, prog=prog)


train.takes_words = True


def run_training(argv: list[str], loop: bool, config: type | None, prog: str | None = None) -> None:
    """Train by a command line. `config`: the settings of a script's family; None for the family of the recipe."""
    recipes = []
    with (
        entry(lambda: recipes.append(check_early(argv, loop, config, prog)), meets=True),
        network_forbidden(getattr(recipes[0].model, "offline", False)),
    ):
        if asked := read_dry_run(argv):
            from ..doctor.memory import forecast
            from .dry_run import dry_run

            dry_run(*recipes, *asked, forecast)  # type: ignore[call-arg]
        else:
            run_recipe(*recipes, loop)  # type: ignore[call-arg]


def run_recipe(recipe: Recipe, loop: bool) -> None:
    """Train by a recipe: by the hand-written loop, or under PaddleNLP's Trainer. Raises PpldmError."""
    from ..train import run_loop, train_recipe

    warn_of_idle(recipe, loop)
    if not loop:
        from ..trainer import run_trainer as run_loop
    with naming_origins(recipe.settings, FilelistError):
        train_recipe(recipe, run_loop)


def with_underscores(word: str) -> str:
    """`--learning-rate=1` as `--learning_rate=1`: both spellings of a flag are the same flag; and `config=FILE`, as
    open-diffusion has it, as `--config=FILE`."""
    word = f"--{word}" if word.startswith("config=") else word
    flag, equals, value = word.partition("=")
    return flag.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word


def warn_of_idle(recipe: Recipe, loop: bool) -> None:
    """Say which settings do nothing, and where loader processes were asked for beyond the cores."""
    num_workers, cores = recipe.training.dataloader_num_workers, count_usable_cores()
    if cores < num_workers != defaults(type(recipe.model), loop)["compute.dataloader_num_workers"]:
        text = "--dataloader_num_workers %d is above the %s of this machine: each takes memory, and they take turns"
        get_logger().warning(text, num_workers, count_of(cores, "core"))
    for stated in idle_settings(recipe, loop):
        get_logger().warning("--%s does nothing %s", stated.name, stated.needs.reason)


def check_early(argv: list[str], loop: bool = True, config: type | None = LdmConfig, prog: str | None = None) -> Recipe:
    """As `read_recipe`, and what it names is there. Raises ConfigError, ModelError."""
    recipe = read_recipe(argv, loop, config, prog)
    with naming_origins(recipe.settings):
        check_recipe(recipe, read_dry_run(argv) is not None)
    return recipe


def check_recipe(recipe: Recipe, is_dry: bool = False) -> None:
    """Raises ConfigError, ModelError for what a recipe names and what is not there, or no model can be made of. is_dry:
    data, tokenizers and weights may come later, and are only warned of."""
    for group in (recipe.model, recipe.data, recipe.training):
        for name, stated in options(type(group)).items():
            if stated.kind not in _CHECKS or not (value := getattr(group, name)):
                continue
            try:
                _CHECKS[stated.kind](stated, value)
            except PpldmError as error:
                if not is_dry or stated.kind not in _LATER:
                    raise
                get_logger().warning("the run will need it: %s", error)
    check_family(recipe.model, recipe.data, recipe.training)


def _check_file(stated: Option, value: str) -> None:
    if is_address(value):
        return  # the first rank that reads it asks the store, and says what is wrong
    if not Path(value).is_file():
        what = "is a folder" if Path(value).is_dir() else "is not there"
        raise ConfigError(f"--{stated.name} {value} {what}; give the path of a file")


def _check_rows(stated: Option, value: str) -> None:
    if is_address(value) or not (folder := Path(value)).is_dir():
        _check_file(stated, value)
    else:
        _check_named(lambda _: list_of_folder(folder) or parts_of_folder(folder))(stated, value)


def _check_named(check):
    def checked(stated: Option, value: str) -> None:
        try:
            check(value)
        except PpldmError as error:
            raise type(error)(f"--{stated.name}: {error}") from error

    return checked


_LATER = ("rows", "model", "tokenizer", "lpips")  # the kinds of options whose data or weights a dry run does without
# What the value of an option must pass, by its kind.
_CHECKS = {
    "file": _check_file,
    "rows": _check_rows,
    "network": lambda stated, value: find_network_file(value, f"--{stated.name}"),
    "model": _check_named(check_name),
    "tokenizer": _check_named(check_tokenizer),
    "device": lambda _, value: parse_device(value),
}


def read_recipe(argv: list[str], loop: bool, config: type | None = LdmConfig, prog: str | None = None) -> Recipe:
    """The recipe of a command line, checked. `config`: the settings of a script's family; None for the recipe's own.
    Shows the presets or the recipe, and ends, where that is asked for. Raises ConfigError."""
    source, words = _read(argv, _add_source_flags)
    if source.list_presets:
        width = max(map(len, list_presets()))
        sys.stdout.write("".join(f"{name:<{width}}  {what}\n" for name, what in list_presets().items()))
        raise SystemExit(0)
    layers = file_layers(preset_path(source.preset)) if source.preset else []
    layers += file_layers(source.config) if source.config else []
    overrides = [word for word in words if _OVERRIDE.match(word)]
    if config is None:
        said = [*layers, override_layer(overrides, {})]
        name = str(last_value(said, "family") or DEFAULT_FAMILY)
        if name not in list_families():
            raise ConfigError(f"{where_of(said, 'family')} {name} is not known; {did_you_mean(name, list_families())}")
        config = get_family(name).Config
    given, more = read_flags([word for word in words if word not in overrides], loop, config, prog)
    schema = schema_of(config)
    layers += [override_layer([*overrides, *more], schema), flag_layer(given, schema)]
    if (name := last_value(layers, "family", config.family)) != config.family:  # type: ignore[attr-defined]
        where = where_of(layers, "family")
        raise ConfigError(f"{where} {name} is not what this script trains ({config.family}); use `ppldm train`")  # type: ignore[attr-defined]
    may_lack = lambda stated: source.print_config or source.dry_run and stated.kind in _LATER  # noqa: E731
    settings = merge_settings(layers, loop, config, may_lack)
    if source.print_config:
        if World.detect().is_main:
            sys.stdout.write(write_settings(settings, origins=True))
        raise SystemExit(0)
    usual = defaults(config, loop)
    for key, stated in schema.items():
        if ("loop" if loop else "trainer") not in stated.scripts and settings[key].value != usual[key]:
            raise ConfigError(f"the hand-written loop has no --{stated.name}; omit it")
    recipe = recipe_of(settings, config)
    check_reporters(recipe.training.report_to)
    if recipe.training.push_to_hub:
        from ..hub import check_hub

        check_hub(recipe.training)
    if not loop and not recipe.training.do_train:
        raise ConfigError("nothing to do: add --do_train")
    return recipe


def read_dry_run(argv: list[str]) -> tuple[int, bool] | None:
    """(devices that `--dry_run` reckons with, whether it answers as JSON); None without it. Raises ConfigError."""
    given, _ = _read(argv, _add_source_flags)
    if given.num_devices < 1:
        raise ConfigError(f"--num_devices {given.num_devices} must be 1 or more")
    if given.json and not given.dry_run:
        raise ConfigError("--json is for --dry_run; omit it, or add --dry_run")
    return (given.num_devices, given.json) if given.dry_run else None


def _read(words: list[str], add_flags: Callable) -> tuple[argparse.Namespace, list[str]]:
    """(the flags that `add_flags` adds to a parser, the other words). Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return parse_known(parser, words)


def _add_source_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recipe (docs/training.md)", "key=value, as data.resolution=512, beats a file.")
    group.add_argument("--config", metavar="FILE", help="YAML file of settings; flags win over it.")
    group.add_argument("--preset", metavar="NAME", help="Recipe of the package; a file wins over it.")
    group.add_argument("--print_config", action="store_true", help="Show all settings and their origins, and end.")
    group.add_argument(
        "--dry_run", action="store_true", help="Check all, show networks, parameters and memory of weights, and end."
    )
    group.add_argument("--num_devices", type=int, default=1, metavar="N", help="Devices that --dry_run reckons with.")
    group.add_argument("--json", action="store_true", help="With --dry_run: as JSON, for scripts.")
    group.add_argument("--list_presets", action="store_true", help="Show the names of the presets, and end.")


def make_parser(loop: bool, config: type = LdmConfig, prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of the Trainer script, or of a hand-written loop's. `config`: the settings of what is trained."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s --output_dir OUT --file_list LIST [flags]\n"
        "       %(prog)s --config FILE | --preset NAME [key=value ...] [flags]",
        description="Stopped at any moment, the same command goes on from the last checkpoint in OUT. "
        "A flag of type BOOL without a value means true. Steps are optimizer updates.",
        epilog="On CPUs, threads and MKL's path are chosen before Paddle is loaded, and said in the log: what the "
        "environment sets already stays (OMP_NUM_THREADS, MKL_DEBUG_CPU_TYPE), and PPLDM_NO_CPU_TUNING=1 chooses "
        "nothing and computes with Paddle's own operators. PPLDM_DEBUG=1 shows tracebacks and the libraries' own logs.",
        formatter_class=lambda prog: flag_formatter()(prog, max_help_position=30, width=100),
    )
    _add_source_flags(parser)
    if prog:  # the command starts processes, which the scripts leave to their launcher
        add_launch_flags(parser)
    add_options(parser, schema_of(config), defaults(config, loop), "loop" if loop else "trainer")
    return parser


def read_flags(
    words: list[str], loop: bool, config: type = LdmConfig, prog: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """(options of a command line by name, words that look like overrides). Raises ConfigError for unknown flags."""
    parser = make_parser(loop, config, prog)
    namespace, others = parse_known(parser, words)
    overrides = [word for word in others if "=" in word and not word.startswith("-")]
    others = [word for word in others if word not in overrides]
    if others and (others := refuse_other_flags(others, loop)):
        raise ConfigError(explain_unknown(others[0], parser))
    given = given_options(namespace, schema_of(config))
    if not loop and (folder := given.get("logging_dir")) and "://" not in folder:
        # As PaddleNLP has it; the published loop, and recipes, mean a folder inside the output folder.
        given["logging_dir"] = str(Path(folder).expanduser().absolute())
    return given, overrides


def refuse_other_flags(words: list[str], loop: bool) -> list[str]:
    """The words of a command line that are not flags of PaddleNLP's Trainer either. Raises ConfigError for one of its
    flags that would change something: nothing here does what it asks for. PaddleNLP, and with it Paddle, is imported
    only where one of its flags is among the words."""
    known = names_of_trainer_flags()
    given = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    if known.isdisjoint(given | {name.removeprefix("no_") for name in given}):
        return words
    load_paddle()
    from ..trainer import parse_trainer_flags

    changed, others = parse_trainer_flags(words)
    for name in changed:
        if name in _NOT_SUPPORTED:
            raise ConfigError(f"--{name} {_NOT_SUPPORTED[name]}; omit it")
        script = "the hand-written loop has no" if loop else "the Trainer script has no use for"
        raise ConfigError(f"{script} --{name}; omit it")
    return others


def names_of_trainer_flags() -> set[str]:
    """The names of all flags of PaddleNLP's Trainer, read from its source, which takes milliseconds."""
    found = importlib.util.find_spec("paddlenlp")
    if not found:
        return set()
    text = (Path(found.origin).parent / "trainer" / "training_args.py").read_text(encoding="utf-8")
    return set(re.findall(r"^    (\w+): [^\n]+ = field\(", text.partition("class TrainingArguments")[2], re.MULTILINE))


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `read_launch` takes."""
    group = parser.add_argument_group("processes (docs/launching.md)", "One process for each device.")
    group.add_argument("--devices", metavar="0,1", help="Numbers of the devices; on a CPU only how many processes.")
    group.add_argument("--nnodes", type=int, metavar="N", help="Machines; the same command on each.")
    group.add_argument("--master", metavar="HOST:PORT", help="Where the machines meet: the first one, and a free port.")
    group.add_argument("--node_rank", type=int, metavar="N", help="This machine's number, from 0; else by arrival.")
    more = "Go on from the last checkpoint after a failure, at most so many times without a new checkpoint between."
    group.add_argument("--max_restarts", type=int, metavar="N", help=more)


def read_launch(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this module, and the words that are none of them. Raises ConfigError."""
    given, rest = _read(words, add_launch_flags)
    for name in ("nnodes", "max_restarts"):
        if (value := getattr(given, name)) is not None and value < 1:
            raise ConfigError(f"--{name} {value} must be 1 or more")
    if (given.nnodes or 1) > 1 and not given.master:
        raise ConfigError(f"--nnodes {given.nnodes} needs --master HOST:PORT, the address of the first of the machines")
    for name in ("master", "node_rank"):
        if getattr(given, name) is not None and (given.nnodes or 1) == 1:
            raise ConfigError(f"--{name} does nothing without --nnodes above 1; add it or omit both")
    return given, rest


def is_wanted(given: argparse.Namespace) -> bool:
    """Whether the command is to start processes: some flag asks for it, and it is not one of them itself."""
    return any(value is not None for value in vars(given).values()) and World.detect().size == 1


def count_devices(given: argparse.Namespace) -> int:
    """Of all machines, by these flags."""
    return len((given.devices or "0").split(",")) * (given.nnodes or 1)


def launch_command(given: argparse.Namespace, words: list[str], logs: Path, environ: Mapping[str, str]) -> list[str]:
    """What runs `ppldm train` with `words` as the flags ask. Raises ConfigError for devices that there are not."""
    command = [sys.executable, "-u", "-m", "ppldm", "train", *words]
    if given.devices is None and given.nnodes is None:
        return command
    launcher = [sys.executable, "-u", "-m", LAUNCHER, *launch_arguments(launch_kind(), given.devices or "", environ)]
    if given.nnodes:
        launcher += ["--nnodes", str(given.nnodes)]
    if given.master:
        launcher += ["--master", given.master]
    if given.node_rank is not None:
        launcher += ["--rank", str(given.node_rank)]
    if (given.nnodes or 1) > 1:  # the folder is one for all machines
        logs /= socket.gethostname() if given.node_rank is None else f"node-{given.node_rank}"
    return [*launcher, "--log_dir", str(logs), *command]


def launch(given: argparse.Namespace, words: list[str], recipe: Recipe) -> None:
    """Run the command that the flags ask for, and end with its exit status."""
    folder = Path(recipe.training.output_dir)
    command = launch_command(given, words, folder / LAUNCH_LOGS, all_variables())
    if given.max_restarts is None:
        os.execv(command[0], command)
    from ...utils.processes.workers import supervise

    environ = dict(all_variables())
    if not find_job(environ):  # by which --overwrite_output_dir starts anew once
        environ["PPLDM_JOB_ID"] = f"{socket.gethostname()}-{os.getpid()}-{time.time():.0f}"

    def newest_step() -> int:
        return max(map(step_of, list_checkpoints(folder)), default=0)

    sys.exit(supervise(command, given.max_restarts, newest_step, environ))
