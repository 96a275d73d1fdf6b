"""What a user asks of a run while it trains: files in RUN/control/, made by `touch` or by `ppldm watch --control`.

    sample_now    draw the validation pictures after this update
    save_now      write a checkpoint after this update
    stop          write a checkpoint after this update, and end as Ctrl-C ends a run
    prompts.txt   what to draw from now on in place of --validation_prompts; without it, those again

The main process looks when an update is settled and removes each of the first three as it takes it, so that no order is
obeyed twice; the update's all-reduce tells it to the other ranks. None of it changes a later update: drawing leaves no
trace, a checkpoint reads the state, and a run that stopped goes on with the same bits.
"""

import os
import socket
import stat
import time
from enum import IntFlag
from pathlib import Path

from ...utils.errors import ConfigError
from ...utils.files import passing_over, write_json
from ...utils.log import get_logger
from ...utils.processes.rank_watch import gather_objects
from ...utils.processes.world import World

CONTROL_DIR = "control"
PROMPTS_FILE = "prompts.txt"
STATUS_FILE = "status.json"  # what the page cannot know from elsewhere: updates in all, where the run is
MOST_PROMPTS = 64
MOST_BYTES = 64 << 10  # of the file of prompts


class Order(IntFlag):
    """What is asked for, once. The name in small letters is that of the file."""

    SAMPLE_NOW = 1
    SAVE_NOW = 2
    STOP = 4

    @property
    def file(self) -> str:
        """The name of its file."""
        return self.name.lower()


NOTHING = Order(0)


def describe(orders: Order) -> str:
    """The names of the files of some orders."""
    return ", ".join(order.file for order in Order if order in orders)


class Control:
    """The folder of one run, seen by one of its ranks. Only the main one touches it."""

    def __init__(self, output_dir: Path, world: World):
        self.folder, self.is_main = Path(output_dir, CONTROL_DIR), world.is_main
        self._refused: set[str] = set()

    def open(self, **status) -> None:
        """Make the folder and its status.json. Orders that an earlier start has not taken are void."""
        if not self.is_main:
            return
        with passing_over(self.folder):
            self.folder.mkdir(exist_ok=True)
            if void := self.take():
                get_logger().info("%s: what was asked of an earlier start is void: %s", self.folder, describe(void))
            here = {"host": socket.gethostname(), "process": os.getpid(), "started": round(time.time(), 3)}
            write_json(self.folder / STATUS_FILE, {**here, **status})
            if (self.folder / PROMPTS_FILE).exists():
                get_logger().info("%s takes the place of --validation_prompts", self.folder / PROMPTS_FILE)

    def take(self) -> Order:
        """What is asked for now; its files are gone. None of it on any rank but the main one. Never raises."""
        asked = NOTHING
        try:
            names = set(os.listdir(self.folder)) if self.is_main else ()
        except OSError:  # somebody has removed the folder
            return asked
        for order in Order:
            if order.file in names and order.file not in self._refused and self._remove(order.file):
                asked |= order
        return asked

    def _remove(self, name: str) -> bool:
        try:
            os.unlink(self.folder / name)
            return True
        except OSError as error:
            # An order that stays would be obeyed after every update.
            self._refused.add(name)
            get_logger().warning(
                "%s cannot be removed (%s), so it is not obeyed; make it as the user of the run, a plain file",
                self.folder / name,
                error.strerror,
            )
            return False


def current_prompts(output_dir: Path, world: World) -> list[str]:
    """The prompts of control/prompts.txt, the same on all ranks; none where there is no such file, or no sound one.
    A collective call."""
    return gather_objects(_read_prompts(Path(output_dir, CONTROL_DIR, PROMPTS_FILE)) if world.is_main else [], world)[0]


def _read_prompts(path: Path) -> list[str]:
    try:
        state = path.stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        get_logger().warning("%s cannot be read (%s); --validation_prompts are drawn", path, error.strerror or error)
        return []
    try:
        size = state.st_size
        if not stat.S_ISREG(state.st_mode):
            raise ConfigError(f"{path} is not a plain file")
        if size > MOST_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes; {MOST_BYTES:,} are read at most")
        from ...inference.prompts import read_requests

        prompts = [request.prompt for request in read_requests(path)]
        if len(prompts) > MOST_PROMPTS:
            raise ConfigError(f"{path} has {len(prompts)} prompts; {MOST_PROMPTS} are drawn at most")
        return prompts
    except ConfigError as error:
        get_logger().warning("%s; --validation_prompts are drawn", error)
        return []
