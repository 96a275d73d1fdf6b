"""The machine under a run, as far as it is known in milliseconds and without paddle; nothing is written."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...config.training import TrainingOptions
from ...utils.errors import PpldmError
from ...utils.files import count_free_bytes
from ...utils.log import get_logger

SHARED_MEMORY = Path("/dev/shm")
_LOCKS_BYTES = 1 << 20  # of loader processes: their arrays do not lie there (`data.loader`)
_DEVICES_BYTES = 1 << 29  # of several devices of one machine that talk through it, as NCCL does
_LEAST_FREE_BYTES = 1 << 30
_CLOCK_SECONDS = 300  # that a file's time may be ahead
_OLDEST_SECONDS = 1_735_689_600  # 2025-01-01: no version of this program is older
STATUSES = ("ok", "warning", "error")  # the worst last


@dataclass(frozen=True)
class Finding:
    """`name`: what was looked at. `fix`: what to change; empty where all is well."""

    name: str
    status: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.status:<8}{self.name:<16}{self.text}" + (f"; {self.fix}" if self.fix else "")


def judged(name: str, text: str, warning: str = "", error: str = "") -> Finding:
    """`text` with the remedy `error` or `warning`, the worse of those that are there; else that all is well."""
    status = "error" if error else "warning" if warning else "ok"
    return Finding(name, status, text, error or warning)


def examine(name: str, look: Callable[..., Iterable[Finding]], *given) -> list[Finding]:
    """What `look` finds; an error of ours that it meets is a finding too, which has its own remedy."""
    found: list[Finding] = []
    try:
        found.extend(look(*given))
    except PpldmError as error:
        found.append(Finding(name, "error", str(error)))
    return found


def look_quickly(arguments: TrainingOptions) -> None:
    """Warnings in the log before a run, of what takes milliseconds to see."""
    found = examine("shared memory", look_at_shared_memory, arguments, 1)
    found += examine("disk", look_at_disk, arguments, None)
    for one in found + examine("clock", look_at_clock, arguments):
        if one.status != "ok":
            get_logger().warning("doctor: %s: %s%s", one.name, one.text, f"; {one.fix}" if one.fix else "")


def look_at_shared_memory(arguments: TrainingOptions, num_devices: int) -> Iterator[Finding]:
    """Loader processes need room for their locks, several devices for what they say."""
    folder, workers = SHARED_MEMORY, arguments.dataloader_num_workers
    if not folder.is_dir():
        yield judged("shared memory", f"{folder} is not there", "" if not workers else "--dataloader_num_workers 0")
        return
    usage = shutil.disk_usage(folder)
    needed = _LOCKS_BYTES if workers else 0
    text = f"{folder} has {_size(usage.free)} free of {_size(usage.total)}"
    more = f"give the container more (docker run --shm-size {{}}), or free some of {folder}"
    warning = more.format("2g") if num_devices > 1 and usage.free < _DEVICES_BYTES else ""
    error = f"{more.format('64m')}, or --dataloader_num_workers 0" if usage.free < needed else ""
    yield judged("shared memory", text, warning, error)


def look_at_disk(
    arguments: TrainingOptions, checkpoint_bytes: int | None, num_checkpoints: int = 1, more: int = 0
) -> Iterator[Finding]:
    """Room for the run's folder: for `num_checkpoints` of so many bytes, one more while it is written, and `more` bytes
    of what else the run leaves. None: of a size that is not known yet."""
    folder = Path(arguments.output_dir).absolute()
    folder = next(one for one in (folder, *folder.parents) if one.is_dir())
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "error", f"{folder} cannot be written", "--output_dir FOLDER that can")
        return
    free = count_free_bytes(folder)
    if checkpoint_bytes is None:
        fix = f"free some of {folder}, or choose another --output_dir" if free < _LEAST_FREE_BYTES else ""
        yield judged("disk", f"{folder} has {_size(free)} free", warning=fix)
        return
    least, whole = 2 * checkpoint_bytes, (num_checkpoints + 1) * checkpoint_bytes + more
    text = f"{folder} has {_size(free)} free; a checkpoint takes {_size(checkpoint_bytes)}, and the run keeps "
    text += f"{num_checkpoints}; its exported model and snapshots take {_size(more)}"
    fix = "free some, choose another --output_dir, or keep fewer checkpoints: --save_total_limit 2"
    yield judged("disk", text, warning=fix if free < whole else "", error=fix if free < least else "")


def look_at_clock(arguments: TrainingOptions) -> Iterator[Finding]:
    """A clock that is wrong makes indexes look stale and logs unreadable: it must not be behind the run's files."""
    now, folder = time.time(), Path(arguments.output_dir)
    times = [path.stat().st_mtime for path in folder.iterdir()] if folder.is_dir() else []
    ahead = max(times, default=now) - now
    fix = "set the machine's clock (timedatectl set-ntp true)"
    if now < _OLDEST_SECONDS:
        yield Finding("clock", "error", f"it says {time.strftime('%Y-%m-%d', time.gmtime(now))}", fix)
    else:
        text = f"it says {time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC"
        text += f", and a file in {folder} is {ahead:.0f} s ahead of that" if ahead > _CLOCK_SECONDS else ""
        yield judged("clock", text, warning=fix if ahead > _CLOCK_SECONDS else "")


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
