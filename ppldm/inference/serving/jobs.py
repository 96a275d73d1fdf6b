"""A queue of drawings: one after the other in the order in which they came, each with its progress, until cancelled.

Jobs are `waiting` → `drawing` → `done`, `failed` or `cancelled`. One thread draws; all else may be asked from any
thread. What is kept is bounded. Nothing here knows what a drawing is.
"""

import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.errors import PpldmError, describe
from ...utils.files import atomic_write, make_output_dir
from ...utils.log import get_logger

WAITING, DRAWING, DONE, FAILED, CANCELLED = ("waiting", "drawing", "done", "failed", "cancelled")
ENDED = (DONE, FAILED, CANCELLED)
FAILED_INSIDE = "drawing failed; the terminal of ppldm shows why"


class QueueFullError(PpldmError):
    """More jobs wait than the queue holds."""


class StoppingError(PpldmError):
    """The queue takes no more jobs: it is about to end."""


class _Cancelled(Exception):
    """Raised inside a drawing that nobody wants any more."""


@dataclass(eq=False)
class Job:
    """One drawing. settings: what is told of it. plan: what `draw` draws, until it has ended. num_steps: of all its
    batches. warning: what its sender should know. preview: uint8 [h, w, 3], what it may become; None: nothing yet.
    Times are seconds since 1970; 0: not yet."""

    id: str
    settings: dict
    num_steps: int
    state: str = WAITING
    step: int = 0
    num_pictures: int = 0
    error: str = ""
    warning: str = ""
    started: float = 0.0
    ended: float = 0.0
    plan: Any = None
    preview: np.ndarray | None = None
    is_cancelled: bool = False


class Pictures:
    """Finished pictures as PNG: files of `folder`, or at most `most_bytes` of them in memory, the oldest forgotten."""

    def __init__(self, folder: Path | None = None, most_bytes: int = 256 << 20):
        self.folder, self.most_bytes, self.bytes = folder, most_bytes, 0
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        if folder is not None:
            make_output_dir(folder)

    def put(self, name: str, content: bytes) -> None:
        """Keep one. Raises OutputError."""
        if self.folder is not None:
            with atomic_write(self.folder / name) as file:
                file.write(content)
            return
        with self._lock:
            self._held[name] = content
            self.bytes += len(content)
            while self.bytes > self.most_bytes:
                self.bytes -= len(self._held.popitem(last=False)[1])

    def get(self, name: str) -> bytes | None:
        """One of them; None where it is no longer there."""
        if self.folder is None:
            return self._held.get(name)
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def forget(self, name: str) -> None:
        """Take one out of memory; files stay."""
        with self._lock:
            self.bytes -= len(self._held.pop(name, b""))


class Queue:
    """Jobs in their order, and the thread that draws them. draw(job, tell): the job's pictures as PNG; it calls
    tell(step, preview=None) as it goes. most_waiting, most_ended: how many are kept."""

    def __init__(self, draw: Callable, pictures: Pictures, most_waiting: int = 32, most_ended: int = 1000):
        self.pictures, self.most_waiting, self.most_ended = pictures, most_waiting, most_ended
        self.counts: Counter[str] = Counter()  # of jobs by how they ended, of those refused, and of pictures and steps
        self.seconds = 0.0  # of drawing
        self.is_stopping = False
        self._draw = draw
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._changed = threading.Condition()
        self.worker = threading.Thread(target=self._work, name="drawing", daemon=True)
        self.worker.start()

    def add(self, settings: dict, num_steps: int, warning: str = "", plan: Any = None) -> Job:
        """A new job at the end. Raises QueueFullError, StoppingError."""
        with self._changed:
            self.check_room()
            job = Job(secrets.token_hex(8), settings, num_steps, warning=warning, plan=plan)
            self._jobs[job.id] = job
            self._changed.notify_all()
            return job

    def check_room(self) -> None:
        """Raises QueueFullError, StoppingError where a job would not be taken."""
        with self._changed:
            if self.is_stopping:
                self.counts["refused"] += 1
                raise StoppingError("ppldm is about to stop and takes no more jobs; ask again once it has restarted")
            if sum(job.state == WAITING for job in self._jobs.values()) >= self.most_waiting:
                self.counts["refused"] += 1
                most = f"at most {self.most_waiting} may wait"
                raise QueueFullError(f"the queue is full: {most}; ask again when some are done")

    def get(self, name: str) -> Job | None:
        """A job by its id; None where there is none, or it is forgotten."""
        return self._jobs.get(name)

    def jobs(self) -> list[Job]:
        """All that are known, in the order in which they came."""
        with self._changed:
            return list(self._jobs.values())

    def place(self, job: Job) -> int:
        """How many jobs are drawn before one that waits; 0 of all others."""
        if job.state != WAITING:
            return 0
        before = takewhile(lambda one: one is not job, self.jobs())
        return sum(one.state in (WAITING, DRAWING) for one in before)

    def cancel(self, job: Job) -> None:
        """End a job: at once if it waits, after its step if it is drawn. One that has ended already is forgotten."""
        with self._changed:
            job.is_cancelled = True
            if job.state == WAITING:
                self._end(job, CANCELLED)
            elif job.state in ENDED:
                self._forget(job)

    def stop(self) -> bool:
        """Take no more jobs, cancel those that wait, and return whether one was drawn, once that has ended."""
        with self._changed:
            self.is_stopping = True
            was_drawing = any(job.state == DRAWING for job in self._jobs.values())
            for job in list(self._jobs.values()):
                if job.state == WAITING:
                    job.error = "ppldm stopped before it was drawn"
                    self._end(job, CANCELLED)
            self._changed.notify_all()
        self.worker.join()
        return was_drawing

    def picture_name(self, job: Job, number: int) -> str:
        """The name among `pictures` of one of a job's."""
        return f"{job.id}-{number:02d}.png"

    def _work(self) -> None:
        while job := self._next():
            try:
                self._do(job)
                state = DONE
            except _Cancelled:
                state = CANCELLED
            except PpldmError as error:
                state, job.error = FAILED, str(error)
            except Exception as error:  # one drawing's failure, of memory or a bug, is not the end of the others
                get_logger().exception("drawing failed: %s", describe(error))
                state, job.error = FAILED, FAILED_INSIDE
            with self._changed:
                self._end(job, state)

    def _next(self) -> Job | None:
        """The first that waits, once there is one; None when there will be none."""
        with self._changed:
            while not (waiting := next((job for job in self._jobs.values() if job.state == WAITING), None)):
                if self.is_stopping:
                    return None
                self._changed.wait()
            waiting.state, waiting.started = DRAWING, time.time()
            return waiting

    def _do(self, job: Job) -> None:
        def tell(step: int, preview: np.ndarray | None = None) -> None:
            self.counts["steps"] += step - job.step
            job.step = step
            job.preview = job.preview if preview is None else preview
            if job.is_cancelled:
                raise _Cancelled

        for number, content in enumerate(self._draw(job, tell)):
            self.pictures.put(self.picture_name(job, number), content)
            job.num_pictures = number + 1

    def _end(self, job: Job, state: str) -> None:
        """Under the lock."""
        job.state, job.ended = state, time.time()
        job.preview = job.plan = None
        self.counts[state] += 1
        self.counts["pictures"] += job.num_pictures
        self.seconds += job.ended - job.started if job.started else 0.0
        ended = [one for one in self._jobs.values() if one.state in ENDED]
        for one in ended[: max(0, len(ended) - self.most_ended)]:
            self._forget(one)

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.id, None)
        for number in range(job.num_pictures):
            self.pictures.forget(self.picture_name(job, number))
