"""A shard whose decoder hangs or dies over some pictures, for processes that import it by name."""

import os
import signal
import time
from dataclasses import dataclass

from ppldm.prepare.convert.reencode import Resizer
from ppldm.prepare.download import shard
from ppldm.prepare.download.shard import download_shard

ENDS = {
    "hangs": lambda: time.sleep(600),
    "exits": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


@dataclass(frozen=True)
class StubbornResizer(Resizer):
    """`end` names what happens over the pictures `poison`."""

    poison: tuple[bytes, ...] = ()
    end: str = "hangs"

    def fit(self, image):
        if image in self.poison:
            ENDS[self.end]()
        return super().fit(image)


def download_stubborn_shard(task, settings, on_fetch=lambda: None):
    if settings.resizer.end == "hangs":  # only there is a limit waited for; a busy machine may decode for seconds
        shard._DECODE_SECONDS = 5.0
    return download_shard(task, settings, on_fetch)
