"""Latents and text embeddings by the CPUs of a Spark cluster: a task for each part, in Python workers each of which
loads what encodes once.

Parts, networks and latents lie at the same paths on all machines. What a part's files hold does not depend on who makes
them, but for the last bits, which depend on the number of threads: Spark gives a task as many as `spark.task.cpus`.
"""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from ..utils.errors import FULL_DISK, DiskFullError, ModelError, PpldmError
from ..utils.machine.cpu import load_paddle
from ..utils.machine.devices import use_device
from ..utils.machine.spark import following_tasks
from .encode import Account, encode_part
from .kinds import Encoder, Request, Task

DRIVER_MEMORY_GB = 1.0  # which has little to do


def encode_on_spark(spark, tasks: list[Task], num_threads: int) -> Account:
    """Make the files of parts whole by the executors of a session. num_threads: that decode the pictures of a part.
    Raises the first error of a part, when all others are done."""
    encode, tasks = partial(_encode, num_threads=num_threads), [*map(_with_absolute_paths, tasks)]
    with following_tasks(spark, tasks[0].files[0].key.what, len(tasks), num_stages=1):
        done = spark.sparkContext.parallelize(tasks, len(tasks)).map(encode).collect()
    for _, error in done:
        if error:
            raise error
    return sum((account for account, _ in done), Account())


def _with_absolute_paths(task: Task) -> Task:
    prompts = task.source.idx_to_prompt
    names = {name: getattr(task.request, name, None) for name in ("model", "tokenizer")}
    found = {name: os.path.abspath(one) for name, one in names.items() if one and os.path.exists(one)}
    return replace(
        task,
        request=replace(task.request, **found),
        path=task.path.absolute(),
        source=replace(task.source, idx_to_prompt=prompts and Path(prompts).absolute()),
        files=tuple(replace(file, path=file.path.absolute()) for file in task.files),
    )


def _encode(task: Task, num_threads: int) -> tuple[Account, PpldmError | None]:
    """(what became of a part, why it could not be made): Spark would wrap an error in two pages of Java."""
    try:
        encoder = _load(task.request)
        if encoder.digest != task.digest:
            raise ModelError(
                f"{task.request.model} on {socket.gethostname()} has the encoder {encoder.digest}, but the driver "
                f"has {task.digest}; copy the same files to all machines"
            )
        with ThreadPoolExecutor(num_threads) as pool:
            return encode_part(task, encoder, pool), None
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
def _load(request: Request) -> Encoder:
    """What encodes in this process, which Spark keeps for its next tasks."""
    load_paddle()
    use_device("cpu")
    return request.load()
