"""`ppldm train --devices 0,1 --max_restarts 3`: the command starts the ranks of its run itself.

Paddle's launcher starts and watches them (`training/distributed/launch.py`), on this machine or as one of several; a
`Supervisor` around it starts it again where it failed. Each rank is the same command without the flags of this module.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ...config.flags import parse_known
from ...config.recipe import Recipe
from ...utils.errors import ConfigError
from ...utils.machine.devices import launch_arguments, launch_kind
from ...utils.processes.world import World
from ...utils.variables import all_variables
from ...weights.folders import list_checkpoints, step_of
from ..start import LAUNCH_LOGS, find_job

LAUNCHER = "ppldm.training.distributed.launch"


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `read_launch` takes."""
    group = parser.add_argument_group("processes (docs/launching.md)", "One process for each device.")
    group.add_argument("--devices", metavar="0,1", help="Numbers of the devices; on a CPU only how many processes.")
    group.add_argument("--nnodes", type=int, metavar="N", help="Machines; the same command on each.")
    group.add_argument("--master", metavar="HOST:PORT", help="Where the machines meet: the first one, and a free port.")
    group.add_argument("--node_rank", type=int, metavar="N", help="This machine's number, from 0; else by arrival.")
    group.add_argument(
        "--max_restarts",
        type=int,
        metavar="N",
        help="Go on from the last checkpoint after a failure, at most so many times without a new checkpoint between.",
    )


def read_launch(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this module, and the words that are none of them. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False)
    add_launch_flags(parser)
    given, rest = parse_known(parser, words)
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
    from ...utils.processes.supervise import Supervisor

    environ = dict(all_variables())
    if not find_job(environ):  # by which --overwrite_output_dir starts anew once
        environ["PPLDM_JOB_ID"] = f"{socket.gethostname()}-{os.getpid()}-{time.time():.0f}"

    def newest_step() -> int:
        return max(map(step_of, list_checkpoints(folder)), default=0)

    sys.exit(Supervisor(command, given.max_restarts, newest_step, environ).run())
