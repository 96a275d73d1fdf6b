"""`ppldm doctor`: what would go wrong in a run's first hour, said in its first seconds; with the flags of the run.

The quick part (`machine.look_quickly`) runs by itself before every training, where it only warns.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ...config.option import parse_known
from ...config.recipe import idle_settings, naming_origins
from ...utils.errors import ConfigError, PpldmError
from ...utils.text import print_report
from ...utils.variables import network_forbidden
from ..commands.train import LOOPS, add_launch_flags, with_underscores
from . import machine


class FoundErrors(PpldmError):
    """Doctor has found what will stop the run."""


def doctor(argv: list[str]):
    """Look at machine, recipe and data for what would stop a run, and forecast its time, disk and cost."""
    found = show(argv)
    if errors := [one for one in found if one.status == "error"]:
        raise FoundErrors(f"{len(errors)} of the lines above would stop the run; the first: {errors[0].name}")


doctor.takes_words = True


def show(argv: list[str]) -> list[machine.Finding]:
    """Print what is found of a command line, and return it."""
    given, rest = parse_known(_make_parser(), list(map(with_underscores, argv)))
    if given.num_devices is None:
        given.num_devices = len((given.devices or "0").split(",")) * (given.nnodes or 1)
    if given.num_devices < 1:
        raise ConfigError(f"--num_devices {given.num_devices} must be 1 or more")
    given.devices_here = -(-given.num_devices // (given.nnodes or 1))
    found, facts = look(rest, given)
    status = max((one.status for one in found), key=machine.STATUSES.index)
    report = {"status": status, "findings": [asdict(one) for one in found], **facts}
    print_report(report, lambda _: "\n".join(map(str, found)), given.json)
    return found


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppldm doctor",
        description="Look at a machine, a recipe and its data before a run: each line is ok, a warning or an error "
        "with its remedy.",
        epilog="All other flags, --config and --preset are those of ppldm train.",
    )
    parser.add_argument("--loop", choices=LOOPS, default=LOOPS[0], help="As ppldm train has it.")
    parser.add_argument("--num_devices", type=int, metavar="N", help="Devices of the run (default: by --devices).")
    parser.add_argument("--json", action="store_true", help="As JSON.")
    parser.add_argument("--run", metavar="FOLDER", help="A run whose log says how long an update takes.")
    parser.add_argument("--no_timing", dest="timing", action="store_false", help="Do not time updates on a CPU.")
    parser.add_argument("--price_per_hour", type=float, metavar="X", help="Of a device, for the cost of the run.")
    add_launch_flags(parser)
    parser.add_argument("--shared_memory", metavar="FOLDER", help=argparse.SUPPRESS)  # in place of /dev/shm
    return parser


def look(words: list[str], given: argparse.Namespace) -> tuple[list[machine.Finding], dict]:
    """(all that is found of a command line of training, what the forecast and the memory are made of)."""
    from ..commands.train import check_recipe, read_recipe

    found, recipes, facts = machine.examine("packages", machine.look_at_packages), [], {}

    def read() -> Iterator[machine.Finding]:
        recipe = read_recipe(["--do_train", *words] if given.loop == "trainer" else words, given.loop == "hand", None)
        recipes.append(recipe)
        with naming_origins(recipe.settings):
            check_recipe(recipe)
        idle = [f"--{one.name} does nothing {one.needs.reason}" for one in idle_settings(recipe, given.loop == "hand")]
        fix = "omit it" if len(idle) == 1 else "omit them" if idle else ""
        text = "; ".join(idle) or f"family {recipe.family}, settings that go together"
        yield machine.judged("recipe", text, warning=fix)

    found += machine.examine("recipe", read)
    if not recipes:
        return found + machine.examine("ports", machine.look_at_ports, given.master), facts
    recipe = recipes[0]
    place = Path(given.shared_memory) if given.shared_memory else None
    found += machine.examine("shared memory", machine.look_at_shared_memory, recipe.training, given.devices_here, place)
    found += machine.examine("loaders", machine.look_at_loaders, recipe.training, given.devices_here)
    found += machine.examine("clock", machine.look_at_clock, recipe.training)
    found += machine.examine("ports", machine.look_at_ports, given.master)
    if any(one.status == "error" and one.name in ("packages", "recipe") for one in found):
        return found, facts
    from .run import look_at_run

    with network_forbidden(getattr(recipe.model, "offline", False)):
        return look_at_run(recipe, given, found, facts), facts
