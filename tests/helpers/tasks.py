"""Functions that tests run in other processes, which import them from here."""

import os
import sys
import time

from ppldm.utils.errors import OutputError


def work(task: str) -> str:
    """Hang, die, fail or double the text, as it says."""
    if task == "hang":
        time.sleep(600)
    if task == "die":
        os._exit(7)
    if task == "fail":
        raise OutputError("no room")
    return task * 2


def print_it(text: str) -> int:
    """As a library that prints what it was given, and warns of it."""
    print(text)
    sys.stderr.write(text + "\n")
    return 1
