"""Functions that tests run in other processes, which import them from here."""

import os
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
