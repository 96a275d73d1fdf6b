"""Checkpoints written beside the training: it waits for a copy in host memory, and a thread does the rest.

What the thread writes, verifies and rotates is what a save that training waits for does, so a kill finds a checkpoint
whole or absent too; what it may lose is the one that is being written. There is one such save at a time: the next one
waits for it, and so does the end of the run, whose last checkpoint is written while training waits.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import paddle


def copy_to_host(value, into=None):
    """Nested dicts and lists with copies of all tensors in host memory, under their names; other values as they are.

    into: an earlier result, which nobody needs any more. Its tensors are written again where they fit: memory that was
    used before takes a fifth of the time.
    """
    if isinstance(value, dict):
        before = into if isinstance(into, dict) else {}
        return {key: copy_to_host(one, before.get(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copy_to_host, value))
    if not isinstance(value, paddle.Tensor):
        return value
    if isinstance(into, paddle.Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype):
        into.copy_(value.detach(), True)
        copy = into
    else:
        copy = value.detach()._copy_to(paddle.CPUPlace(), True)
    copy.name = value.name  # by which Paddle keys an optimizer's state
    return copy


class BackgroundSaves:
    """At most one save at a time, in a thread. A context: its end waits for the last one."""

    def __init__(self):
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None
        self._copies: dict | None = None

    def copy(self, contents: dict) -> dict:
        """Copies of what a save is to hold, until the next ones are made. Raises what the save before it raised."""
        self.wait()
        self._copies = copy_to_host(contents, self._copies)
        return self._copies

    def start(self, save: Callable[[], None]) -> None:
        """Run `save` in the thread. Raises what the save before it raised."""
        self.wait()
        self._pending = self._executor.submit(save)

    def wait(self) -> None:
        """Until nothing is being written. Raises what that save raised."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        try:
            self.wait()
        finally:
            self._executor.shutdown()
