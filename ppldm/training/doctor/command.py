"""`ppldm doctor`: what would go wrong in a run's first hour, said in its first seconds; with the flags of the run.

The quick part (`machine.look_quickly`) runs by itself before every training, where it only warns.
"""

import argparse
import socket
from collections.abc import Iterator
from dataclasses import asdict

from ...config.load import file_layers, last_value
from ...config.option import parse_known
from ...config.recipe import RECIPE_FILE, idle_settings, naming_origins
from ...config.training import TrainingOptions
from ...utils.errors import ConfigError, PpldmError
from ...utils.files import in_working_folder
from ...utils.machine.cpu import load_paddle
from ...utils.machine.environment import find_problems, installed_versions
from ...utils.machine.resources import count_usable_cores
from ...utils.text import count_of, print_report
from ...utils.variables import network_forbidden, read
from ...weights.folders import list_checkpoints, one_run
from ..checkpoint import read_manifest
from ..commands.train import LOOPS, add_launch_flags, check_recipe, count_devices, read_recipe, with_underscores
from . import machine
from .machine import Finding, examine, judged

_CONNECT_SECONDS = 3.0


class FoundErrors(PpldmError):
    """Doctor has found what will stop the run."""


def doctor(argv: list[str]):
    """Look at machine, recipe and data for what would stop a run, and forecast its time, disk and cost."""
    found = show(argv)
    if errors := [one for one in found if one.status == "error"]:
        raise FoundErrors(f"{len(errors)} of the lines above would stop the run; the first: {errors[0].name}")


doctor.takes_words = True


def show(argv: list[str]) -> list[Finding]:
    """Print what is found of a command line, and return it."""
    given, rest = parse_known(_make_parser(), list(map(with_underscores, argv)))
    own = given.run and not {"--preset", "--config", "--file_list"} & {word.partition("=")[0] for word in rest}
    words, manifest = read_own_recipe(given) if own else ([], {})
    if given.num_devices is None:
        given.num_devices = count_devices(given)
    if given.num_devices < 1:
        raise ConfigError(f"--num_devices {given.num_devices} must be 1 or more")
    given.devices_here = -(-given.num_devices // (given.nnodes or 1))
    with in_working_folder(manifest):
        found, facts = look([*words, *rest], given)
    status = max((one.status for one in found), key=machine.STATUSES.index)
    report = {"status": status, "findings": [asdict(one) for one in found], **facts}
    print_report(report, lambda _: "\n".join(map(str, found)), given.json)
    return found


def read_own_recipe(given: argparse.Namespace) -> tuple[list[str], dict]:
    """(words that name the recipe of the run `--run`, the manifest of its newest checkpoint); `given` gets its loop and
    number of devices. Raises ConfigError where there is no run."""
    run = one_run(given.run).absolute()
    manifest = next(map(read_manifest, list_checkpoints(run)), {})
    given.run, recipe = str(run), run / RECIPE_FILE
    given.loop = LOOPS[bool(last_value(file_layers(recipe), "run.do_train"))]
    given.num_devices = given.num_devices or (None if given.devices else manifest.get("machine", {}).get("ranks"))
    return ["--config", str(recipe)], manifest


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
    parser.add_argument("--run", metavar="FOLDER", help="A run whose log times an update; alone, it is looked at.")
    parser.add_argument("--no_timing", dest="timing", action="store_false", help="Do not time updates on a CPU.")
    parser.add_argument("--price_per_hour", type=float, metavar="X", help="Of a device, for the cost of the run.")
    add_launch_flags(parser)
    return parser


def look(words: list[str], given: argparse.Namespace) -> tuple[list[Finding], dict]:
    """(all that is found of a command line of training, what the forecast and the memory are made of)."""
    found, recipes, facts = examine("packages", look_at_packages), [], {}

    def read_it() -> Iterator[Finding]:
        recipe = read_recipe(["--do_train", *words] if given.loop == "trainer" else words, given.loop == "hand", None)
        recipes.append(recipe)
        with naming_origins(recipe.settings):
            check_recipe(recipe)
        idle = [f"--{one.name} does nothing {one.needs.reason}" for one in idle_settings(recipe, given.loop == "hand")]
        fix = "omit it" if len(idle) == 1 else "omit them" if idle else ""
        text = "; ".join(idle) or f"family {recipe.family}, settings that go together"
        if not {"--preset", "--config"} & {word.partition("=")[0] for word in words}:
            text += "; without --preset or --config it starts from the defaults of ppldm train"
        yield judged("recipe", text, warning=fix)

    found += examine("recipe", read_it)
    if not recipes:
        return found + examine("ports", look_at_ports, given.master), facts
    recipe = recipes[0]
    found += examine("shared memory", machine.look_at_shared_memory, recipe.training, given.devices_here)
    found += examine("loaders", look_at_loaders, recipe.training, given.devices_here)
    found += examine("clock", machine.look_at_clock, recipe.training)
    found += examine("ports", look_at_ports, given.master)
    if any(one.status == "error" and one.name in ("packages", "recipe") for one in found):
        return found, facts
    load_paddle()  # as a training does, whose updates are timed
    from .run import look_at_run

    with network_forbidden(getattr(recipe.model, "offline", False)):
        return look_at_run(recipe, given, found, facts), facts


def look_at_packages() -> Iterator[Finding]:
    """Versions that are missing or known to be bad with others, as `ppldm env` lists them."""
    versions = installed_versions()
    problems = find_problems(versions)
    for problem in problems:
        yield Finding("packages", "error", problem.found, problem.fix)
    if not problems:
        yield judged("packages", f"paddlepaddle {versions.get('paddlepaddle') or versions.get('paddlepaddle-gpu')}, "
                   f"{len(versions)} packages that go together")  # fmt: skip


def look_at_loaders(arguments: TrainingOptions, num_devices: int) -> Iterator[Finding]:
    """Loader processes beside the cores."""
    cores, wanted = count_usable_cores(), arguments.dataloader_num_workers * num_devices
    fix = f"--dataloader_num_workers {max(1, cores // num_devices)}" if wanted > cores else ""
    yield judged("loaders", f"{count_of(wanted, 'loader')} on {count_of(cores, 'core')}", warning=fix)


def look_at_ports(master: str | None) -> Iterator[Finding]:
    """That ranks can meet at `master`, HOST:PORT: free where it is this machine, else one that answers."""
    master = master or read("PADDLE_MASTER") or ""
    if not master:
        return
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        yield Finding("ports", "error", f"--master {master} is not HOST:PORT", "write it as in --master 10.0.0.1:6170")
        return
    try:
        address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        yield Finding("ports", "error", f"{host} is not known ({error})", "correct --master, or use its address")
        return
    yield _try_port(master, address)


def _try_port(master: str, address: tuple) -> Finding:
    family, kind, _, _, place = address
    with socket.socket(family, kind) as tried:
        tried.settimeout(_CONNECT_SECONDS)
        try:
            tried.bind((place[0], 0))  # only an address of this machine can be taken
        except OSError:
            try:
                tried.connect(place)
            except ConnectionRefusedError:
                pass  # the machine answers; nobody has started there yet
            except OSError as error:
                fix = "open the port between the machines, or correct --master"
                return Finding("ports", "error", f"{master} cannot be reached ({error})", fix)
            return judged("ports", f"{master} answers")
    with socket.socket(family, kind) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(place)
        except OSError as error:
            fix = "choose another port in --master"
            return Finding("ports", "error", f"{master} is in use ({error.strerror})", fix)
    return judged("ports", f"{master} is free")
