"""The command line of the training scripts: one parser for both, made from the options; no paddle before it is read.

PaddleNLP's Trainer has many more flags than mean something here: those are taken at their defaults, else refused.
"""

import argparse
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ...config.flags import add_options, explain_unknown, given_options, parse_known
from ...config.load import Layer, file_layers, flag_layer, last_value, override_layer, preset_layers, where_of
from ...config.presets import list_presets
from ...config.recipe import SECTIONS, Recipe, defaults, flatten, idle_settings, merge_settings, recipe_of, schema_of
from ...config.write import write_settings
from ...families.base import DEFAULT_FAMILY, get_family, list_families
from ...families.ldm import LdmConfig
from ...utils.errors import ConfigError
from ...utils.log import get_logger
from ...utils.machine.cpu import load_paddle
from ...utils.machine.resources import count_usable_cores
from ...utils.processes.world import World
from ...utils.text import count_of, did_you_mean
from ..monitor.sinks import check_reporters
from .launched import add_launch_flags

_OVERRIDE = re.compile(rf"(family|({'|'.join(SECTIONS)})\.[^=\s]*)=", re.ASCII)


@dataclass(frozen=True)
class Sources:
    """A command line taken apart: layers of preset and file, the weakest first; words that override; flags."""

    layers: list[Layer]
    overrides: list[str]
    flags: list[str]
    print_config: bool


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `split_sources` takes."""
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


def split_sources(argv: list[str]) -> Sources:
    """Read what the words name. Ends the program where presets are to be listed. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False)
    add_source_flags(parser)
    given, rest = parse_known(parser, argv)
    if given.list_presets:
        width = max(map(len, list_presets()))
        sys.stdout.write("".join(f"{name:<{width}}  {what}\n" for name, what in list_presets().items()))
        raise SystemExit(0)
    layers = preset_layers(given.preset) if given.preset else []
    layers += file_layers(given.config) if given.config else []
    overrides = [word for word in rest if _OVERRIDE.match(word)]
    return Sources(layers, overrides, [word for word in rest if word not in overrides], given.print_config)


def read_dry_run(argv: list[str]) -> tuple[int, bool] | None:
    """(devices that `--dry_run` is to reckon with, whether it answers as JSON); None where it is not asked for. Raises
    ConfigError."""
    parser = argparse.ArgumentParser(add_help=False)
    add_source_flags(parser)
    given, _ = parse_known(parser, argv)
    if given.num_devices < 1:
        raise ConfigError(f"--num_devices {given.num_devices} must be 1 or more")
    if given.json and not given.dry_run:
        raise ConfigError("--json is for --dry_run; omit it, or add --dry_run")
    return (given.num_devices, given.json) if given.dry_run else None


# What neither script does: the shared checkpoint would not hold the whole state.
_NOT_SUPPORTED = ("unified_checkpoint", "amp_master_grad", "load_best_model_at_end", "do_eval", "do_predict")
# What was seen to stand against a flag, on PaddleNLP 3.0.0b4 and Paddle 3.3.1.
_WHY_NOT = {
    "unified_checkpoint": "works for PaddleNLP's own model classes only; checkpoints here hold the whole model for any "
    "number of ranks as they are",
}


def refuse_other_flags(words: list[str], loop: bool) -> list[str]:
    """The words of a command line that are not flags of PaddleNLP's Trainer either.

    Raises ConfigError for one of its flags that would change something: nothing here does what it asks for.
    PaddleNLP, and with it Paddle, is imported only where one of its flags is among the words.
    """
    known = names_of_trainer_flags()
    given = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    if known.isdisjoint(given | {name.removeprefix("no_") for name in given}):
        return words
    load_paddle()
    from ..trainer import parse_trainer_flags

    changed, others = parse_trainer_flags(words)
    for name in changed:
        if name in _NOT_SUPPORTED:
            raise ConfigError(f"--{name} {_WHY_NOT.get(name, 'is not supported yet')}; omit it")
        script = "the hand-written loop has no" if loop else "the Trainer script has no use for"
        raise ConfigError(f"{script} --{name}; omit it")
    return others


def names_of_trainer_flags() -> set[str]:
    """The names of all flags of PaddleNLP's Trainer, read from its source, which takes milliseconds."""
    found = importlib.util.find_spec("paddlenlp")
    source = found and Path(found.origin).parent / "trainer" / "training_args.py"
    if not source or not source.is_file():
        return set()
    text = source.read_text(encoding="utf-8")
    return set(re.findall(r"^    (\w+): [^\n]+ = field\(", text.partition("class TrainingArguments")[2], re.MULTILINE))


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
        "nothing. PPLDM_DEBUG=1 shows tracebacks and the libraries' own logs.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
    )
    add_source_flags(parser)
    if prog:  # the command starts processes, which the scripts leave to their launcher
        add_launch_flags(parser)
    add_options(parser, schema_of(config), defaults(config, loop), _script(loop))
    return parser


def read_flags(
    words: list[str], loop: bool, config: type = LdmConfig, prog: str | None = None
) -> tuple[dict[str, dict], list[str]]:
    """(options that a command line gives, by section; words that look like overrides).

    Raises ConfigError for flags that mean nothing here.
    """
    parser = make_parser(loop, config, prog)
    namespace, others = parse_known(parser, words)
    overrides = [word for word in others if "=" in word and not word.startswith("-")]
    others = [word for word in others if word not in overrides]
    if others and (others := refuse_other_flags(others, loop)):
        raise ConfigError(explain_unknown(others[0], parser))
    given = given_options(namespace, schema_of(config))
    if not loop and (folder := given.get("logging", {}).get("logging_dir")) and "://" not in folder:
        # As PaddleNLP has it; the published loop, and recipes, mean a folder inside the output folder.
        given["logging"]["logging_dir"] = str(Path(folder).expanduser().absolute())
    return given, overrides


def read_recipe(argv: list[str], loop: bool, config: type | None = LdmConfig, prog: str | None = None) -> Recipe:
    """The recipe of a command line, checked. `config`: the settings of a script's family; None for the recipe's own.

    Shows the recipe and ends where that is asked for. Raises ConfigError.
    """
    sources = split_sources(argv)
    config = config or _config_of([*sources.layers, override_layer(sources.overrides, {})])
    given, more = read_flags(sources.flags, loop, config, prog)
    schema = {stated.key: stated for known in schema_of(config).values() for stated in known.values()}
    layers = [
        *sources.layers,
        override_layer([*sources.overrides, *more], schema),
        flag_layer({name: value for values in given.values() for name, value in values.items()}, schema),
    ]
    _check_family(layers, config)
    settings = merge_settings(layers, loop, config, keep_missing=sources.print_config)
    if sources.print_config:
        if World.detect().is_main:
            sys.stdout.write(write_settings(settings, origins=True))
        raise SystemExit(0)
    usual = flatten(defaults(config, loop))
    for key, stated in schema.items():
        if _script(loop) not in stated.scripts and settings[key].value != usual[key]:
            raise ConfigError(f"the hand-written loop has no --{stated.name}; omit it")
    recipe = recipe_of(settings, config)
    check_reporters(recipe.training.report_to)
    if not loop and not recipe.training.do_train:
        raise ConfigError("nothing to do: add --do_train")
    return recipe


def _config_of(layers: list[Layer]) -> type:
    """The settings of the family that a recipe names."""
    name = str(last_value(layers, "family") or DEFAULT_FAMILY)
    if name not in list_families():
        raise ConfigError(f"{where_of(layers, 'family')} {name} is not known; {did_you_mean(name, list_families())}")
    return get_family(name).Config


def _check_family(layers: list[Layer], config: type) -> None:
    name = last_value(layers, "family", config.family)
    if name != config.family:
        where = where_of(layers, "family")
        raise ConfigError(f"{where} {name} is not what this script trains ({config.family}); use `ppldm train`")


def parse_arguments(argv: list[str], loop: bool, config: type = LdmConfig) -> tuple:
    """(`config`, DataOptions, TrainingOptions) of a command line, checked. Raises ConfigError.

    Says in the log which of them do nothing.
    """
    recipe = read_recipe(argv, loop, config)
    warn_of_idle(recipe, loop)
    return recipe.model, recipe.data, recipe.training


def warn_of_idle(recipe: Recipe, loop: bool) -> None:
    """Say which settings do nothing, and where loader processes were asked for beyond the cores."""
    num_workers, cores = recipe.training.dataloader_num_workers, count_usable_cores()
    if cores < num_workers != defaults(type(recipe.model), loop)["compute"]["dataloader_num_workers"]:
        get_logger().warning(
            "--dataloader_num_workers %d is above the %s of this machine: each takes memory, and they take turns",
            num_workers, count_of(cores, "core"),
        )  # fmt: skip
    for stated, _ in idle_settings(recipe, loop):
        get_logger().warning("--%s does nothing %s", stated.name, stated.needs.reason)


def _script(loop: bool) -> str:
    return "loop" if loop else "trainer"
