"""Runs that a signal stops, one after another on the same ranks: python signalled.py SEED COUNT FACTS FLAGS.

FLAGS is a JSON list. Run n of COUNT writes to FLAGS' output folder with -n after its name; loop, signal, moment and
the ranks that get it are drawn from (SEED, n), each signal in turn. Each rank writes how each of its runs ended to
FACTS-<rank>.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from command_line import parse_arguments

from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import Interrupted
from ppldm.utils.processes.ranks import World

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def draw(seed: int, number: int) -> dict:
    """What run `number` is to meet."""
    chance = random.Random(f"{seed} {number}")
    return {
        "kind": chance.choice(["loop", "trainer"]),
        "signal": SIGNALS[(seed + number) % len(SIGNALS)],
        "ranks": chance.choice([[0], [1], [0, 1]]),
        "delays": [chance.uniform(0, 0.4), chance.uniform(0, 0.4)],
    }


def send_later(number: int, delay: float) -> None:
    """Another process sends this one the signal, `delay` seconds after training's handlers are in place."""
    before = signal.getsignal(number)

    def wait() -> None:
        while signal.getsignal(number) is before:
            time.sleep(0.005)
        subprocess.Popen(["sh", "-c", f"sleep {delay}; kill -{int(number)} {os.getpid()}"]).wait()

    threading.Thread(target=wait, daemon=True).start()


def main(seed: str, count: str, facts: str, flags: str) -> None:
    world, ends = World.detect(), []
    for number in range(int(count)):
        plan, words = draw(int(seed), number), json.loads(flags)
        words[words.index("--output_dir") + 1] += f"-{number}"
        run = prepare(*parse_arguments([*words, "--do_train"], plan["kind"] == "loop"))
        if world.rank in plan["ranks"]:
            send_later(plan["signal"], plan["delays"][world.rank])
        try:
            (run_loop if plan["kind"] == "loop" else run_trainer)(run)
            ends.append([0, "done"])
        except Interrupted as error:
            ends.append([error.exit_status, str(error)])
        Path(f"{facts}-{world.rank}").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
