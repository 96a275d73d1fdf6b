"""Latents and text embeddings by the CPUs of a Spark cluster: a task for each part, in Python workers each of which
loads what encodes once.

Parts, networks and latents lie at the same paths on all machines. What a part's files hold does not depend on who makes
them, but for the last bits, which depend on the number of threads: Spark gives a task as many as `spark.task.cpus`.
"""

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from ...utils.errors import FULL_DISK, DiskFullError, ModelError, PpldmError
from ...utils.machine.cpu import load_paddle
from ...utils.machine.devices import use_device
from ...utils.machine.spark import following_tasks
from .encode_part import Encode, encode_part
from .encode_texts import EncodeTexts, encode_texts
from .latents_plan import PartTask
from .part_files import Account
from .texts_plan import TextTask

DRIVER_MEMORY_GB = 1.0  # which has little to do


@dataclass(frozen=True)
class Cluster:
    """The executors of a Spark session. num_threads: that decode the pictures of a part."""

    spark: object
    num_threads: int

    @property
    def num_tasks(self) -> int:
        """How many run at a time."""
        return self.spark.sparkContext.defaultParallelism

    def encode(self, tasks: Sequence[PartTask | TextTask], asked: tuple) -> Account:
        """Make the files of parts whole. asked: of `load_encoder`, or of `load_text_encoder`; names come first. Raises
        the first error of a part, when all others are done."""
        names = (os.path.abspath(one) if isinstance(one, str) and os.path.exists(one) else one for one in asked[:2])
        asked = *names, *asked[2:]
        encode = partial(_encode, asked=asked, num_threads=self.num_threads)
        tasks = [*map(_with_absolute_paths, tasks)]
        with following_tasks(self.spark, tasks[0].keys[0].what, len(tasks), num_stages=1):
            done = self.spark.sparkContext.parallelize(tasks, len(tasks)).map(encode).collect()
        for _, error in done:
            if error:
                raise error
        return sum((account for account, _ in done), Account())


def _with_absolute_paths(task: PartTask | TextTask) -> PartTask | TextTask:
    folder, prompts = task.settings.folder, task.source.idx_to_prompt
    return replace(
        task,
        path=task.path.absolute(),
        settings=replace(task.settings, folder=folder and folder.absolute()),
        source=replace(task.source, idx_to_prompt=prompts and Path(prompts).absolute()),
    )


def _encode(task: PartTask | TextTask, asked: tuple, num_threads: int) -> tuple[Account, PpldmError | None]:
    """(what became of a part, why it could not be made): Spark would wrap an error in two pages of Java."""
    try:
        is_text = isinstance(task, TextTask)
        encoder = _load(is_text, asked)
        if encoder.digest != task.settings.digest:
            raise ModelError(
                f"{asked[0]} on {socket.gethostname()} has the encoder {encoder.digest}, and that of the driver is "
                f"{task.settings.digest}; copy the same to all machines"
            )
        with ThreadPoolExecutor(num_threads) as pool:
            return (encode_texts if is_text else encode_part)(task, encoder, pool), None
    except PpldmError as error:
        return Account(), error
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        where = f"{error.filename or task.path} on {socket.gethostname()}"
        return Account(), DiskFullError(
            f"the disk is full for {where} ({error.strerror}); free some and give the same command again"
        )


@lru_cache(maxsize=1)
def _load(is_text: bool, asked: tuple) -> Encode | EncodeTexts:
    """What encodes in this process, which Spark keeps for its next tasks."""
    load_paddle()
    from .picture_encoder import load_encoder
    from .text_encoder import load_text_encoder

    use_device("cpu")
    return (load_text_encoder if is_text else load_encoder)(*asked)
