"""`ppldm <command>`: one function a command; its parameters are the flags, their comments the help.

Nothing heavy is imported before a command is chosen, and a command's module imports at its top only what `--help`
needs. fastcore's `anno_parser` makes the argument parser from the function's signature.
"""

import ast
import sys
from argparse import SUPPRESS
from importlib import import_module
from pathlib import Path

from ..config.option import parse_known_or_suggest, show_values
from ..utils.errors import ConfigError, exit_on_error, quiet_others, showing_hyphens
from ..utils.text import did_you_mean
from ..utils.variables import network_forbidden

# By purpose, as `ppldm --help` shows them: command -> (module, function).
GROUPS = {
    "Start": {
        "quickstart": ("ppldm.demo.quickstart", "quickstart"),
        "init": ("ppldm.training.commands.init", "init"),
        "doctor": ("ppldm.training.doctor.command", "doctor"),
        "env": ("ppldm.utils.machine.environment", "env"),
        "certify": ("ppldm.evaluation.certify.certify", "certify"),
        "config": ("ppldm.config.foreign", "config"),
        "demo-data": ("ppldm.demo.openmoji", "demo_data"),
        "completion": ("ppldm.cli.completion", "completion"),
    },
    "Make training data": {
        "filter": ("ppldm.prepare.filter.filter", "filter"),
        "download": ("ppldm.prepare.download.download", "download"),
        "annotate": ("ppldm.prepare.convert.annotate", "annotate"),
        "convert": ("ppldm.prepare.convert.convert", "convert"),
        "pipeline": ("ppldm.prepare.pipeline", "pipeline"),
        "dataset list": ("ppldm.prepare.datasets.entry", "list_datasets"),
        "dataset show": ("ppldm.prepare.datasets.entry", "show"),
        "dataset get": ("ppldm.prepare.datasets.get", "get"),
        "recaption": ("ppldm.prepare.provenance.recaption", "recaption"),
    },
    "Look at data and tidy it": {
        "index": ("ppldm.inspect.verify", "index"),
        "verify": ("ppldm.inspect.verify", "verify"),
        "stats": ("ppldm.inspect.stats", "stats"),
        "show": ("ppldm.inspect.show", "show"),
        "head": ("ppldm.inspect.show", "head"),
        "vocab": ("ppldm.inspect.vocab", "vocab"),
        "dedup": ("ppldm.inspect.duplicates.dedup", "dedup"),
        "embed": ("ppldm.evaluation.embed", "embed"),
        "cached": ("ppldm.inspect.cached", "cached"),
        "repack": ("ppldm.inspect.repack", "repack"),
        "lineage": ("ppldm.prepare.provenance.lineage", "lineage"),
        "forget": ("ppldm.prepare.provenance.forget", "forget"),
    },
    "Train": {
        "train": ("ppldm.training.commands.train", "train"),
        "finetune": ("ppldm.training.commands.finetune", "finetune"),
        "precompute": ("ppldm.cache.command", "precompute"),
        "replay": ("ppldm.runs.compare", "replay"),
        "watch": ("ppldm.runs.watch", "watch"),
        "report": ("ppldm.runs.page", "report"),
        "plot-loss": ("ppldm.runs.page", "plot_loss"),
    },
    "Draw and measure": {
        "generate": ("ppldm.inference.generate", "generate"),
        "app": ("ppldm.inference.serving.commands", "app"),
        "serve": ("ppldm.inference.serving.commands", "serve"),
        "evaluate": ("ppldm.evaluation.evaluate", "evaluate"),
        "compare": ("ppldm.runs.compare", "compare"),
    },
    "Weights": {
        "fetch": ("ppldm.weights.fetch_command", "fetch"),
        "export": ("ppldm.inference.export", "export"),
        "ema": ("ppldm.training.averages.make", "ema"),
        "lora show": ("ppldm.inference.lora", "show"),
        "lora convert": ("ppldm.inference.lora", "convert"),
        "lora merge": ("ppldm.inference.lora", "merge"),
        "lora extract": ("ppldm.inference.lora", "extract"),
    },
}
COMMANDS = {name: where for commands in GROUPS.values() for name, where in commands.items()}


def load_command(name: str):
    """The function behind `ppldm name`. Raises ConfigError with the nearest names."""
    if name not in COMMANDS:
        hint = did_you_mean(name, [known for known in COMMANDS if known.startswith(name)] or COMMANDS)
        raise ConfigError(f"no command {name!r}; {hint} (`ppldm --help` lists them)")
    module, function = COMMANDS[name]
    return getattr(import_module(module), function)


def usage(start: str = "") -> str:
    """The text of `ppldm --help`: every command with its docstring's first line. start: of those shown, as `lora `."""
    lines = ["usage: ppldm <command> [flags]    (`ppldm <command> --help` explains one)"]
    for group, commands in GROUPS.items():
        shown = [f"  {name:<14}{_first_line(*where)}" for name, where in commands.items() if name.startswith(start)]
        lines += ["", *([f"{group}:"] if not start else []), *shown] if shown else []
    return "\n".join(lines)


def _first_line(module: str, function: str) -> str:
    """Of a function's docstring, read and not imported: that of all commands would take most of a second."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    body = ast.parse(path.read_bytes()).body
    found = next(one for one in body if isinstance(one, ast.FunctionDef) and one.name == function)
    return (ast.get_docstring(found) or "").partition("\n")[0]


def run(argv: list[str]) -> None:
    """Run one command line, without the program's name. Raises PpldmError."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage() + "\n")
        return
    if argv[0] == "--version":
        from .. import __version__

        sys.stdout.write(f"ppldm {__version__}\n")
        return
    name = " ".join(argv[:2]) if " ".join(argv[:2]) in COMMANDS else argv[0]
    has_several = name not in COMMANDS and any(known.startswith(f"{name} ") for known in COMMANDS)
    if has_several and argv[1:] in ([], ["-h"], ["--help"]):
        sys.stdout.write(usage(f"{name} ") + "\n")
        return
    function, words = load_command(name), argv[len(name.split()) :]
    if getattr(function, "takes_words", False):  # it has a parser of its own
        function(words)
        return
    arguments = parse_flags(name, words)
    with network_forbidden(arguments.get("offline", False)), showing_hyphens(arguments):
        function(**arguments)


def parse_flags(name: str, words: list[str]) -> dict:
    """The arguments of a command's function by name. Ends the process as argparse does where a word is not known."""
    from fastcore.script import anno_parser

    function = load_command(name)
    parser = anno_parser(function, prog=f"ppldm {name}")
    for action in tuple(parser._actions):
        if action.dest == "num_workers":
            action.option_strings.append("--workers")
            parser._option_string_actions["--workers"] = action
        if action.const is False:  # fastcore has only --no-x of what is on by default
            flag = f"--{action.dest.replace('_', '-')}"
            parser.add_argument(flag, dest=action.dest, action="store_true", help=SUPPRESS)
    for older, flag in getattr(function, "aliases", {}).items():
        parser._option_string_actions[older] = parser._option_string_actions[flag]
    show_values(parser)
    stated = [_with_hyphens(word) for word in words]
    arguments = vars(parse_known_or_suggest(parser, _without_truth(stated, parser._option_string_actions)))
    for internal in ("pdb", "xtra"):
        arguments.pop(internal)
    return arguments


def main() -> None:
    """The console script `ppldm`."""
    quiet_others()
    with exit_on_error():
        run(sys.argv[1:])


def _without_truth(words: list[str], actions: dict) -> list[str]:
    """Switches written as img2dataset's are, `--json=True` or `--json=False`, as argparse takes them."""
    plain = []
    for word in words:
        flag, _, value = word.partition("=")
        if flag not in actions or actions[flag].nargs != 0 or value.lower() not in ("true", "false"):
            plain.append(word)
        elif value.lower() == "true":
            plain.append(flag)
        elif (opposite := f"--no-{flag[2:]}") in actions:
            plain.append(opposite)
    return plain


def _with_hyphens(word: str) -> str:
    """`--num_workers=2` as `--num-workers=2`, `-n` as `--n`: both spellings of a flag are the same flag."""
    if len(word) == 2 and word[0] == "-" and word[1].isalpha() and word != "-h":
        return f"-{word}"
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value
