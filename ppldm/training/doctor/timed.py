"""Seconds of an update on a CPU: some updates of the very network, on rows of the run, in a folder that is thrown away.

Where a micro-batch would not fit into memory, or would take minutes, a smaller one is timed, of one sample or of
smaller pictures, and its seconds are scaled by the operations of both.
"""

import gc
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from statistics import median

import paddle

from ...config.recipe import Recipe
from ...utils.errors import ConfigError
from ...utils.log import get_logger
from ...utils.machine.resources import available_memory_bytes, count_usable_cores
from ...utils.text import count_of
from ...utils.variables import read
from ..optimizer import autocast
from ..prepare import prepare
from ..train import UpdateGuard, timed_batches, train_step
from .memory import estimate

_SECONDS = 8.0  # of the updates that are timed; thrice that where they are fewer than the least
_LEAST_UPDATES, _MOST_UPDATES, _WARM_UPDATES = 5, 40, 2  # the first of them compile and allocate
_LONGEST_SECONDS = 30.0  # of a micro-batch at the speed of matrix products, which takes twice as long and more
_ROOM = 0.8  # of the free memory that may be taken


def time_updates(recipe: Recipe, processes: int, operations: int, num_bytes: int, speed: float) -> tuple[float, str]:
    """(seconds of an update of the whole recipe, how they were found), of `processes` on this machine that train
    together. operations, num_bytes: of a micro-batch, and what a process takes at its peak; speed: operations a second
    of matrix products. Raises PpldmError where the run would not start, or is too large for this machine."""
    small, share = _affordable(recipe, processes, operations, num_bytes, speed)
    expected = round(max(2 * _SECONDS, 8 * operations / share / speed))
    get_logger().info("timing updates of this network on this CPU, for some %d s", expected)
    seconds, count = _time(small, processes)
    accumulated = recipe.training.accumulation_for(processes)
    batch, side = small.training.per_device_train_batch_size, small.data.resolution
    scaled = f", with {count_of(batch, 'sample')} of {side} px and scaled" if share > 1 else ""
    return seconds * share * accumulated, f"{count_of(count, 'update')} timed on this CPU{scaled}"


def _affordable(recipe: Recipe, processes: int, operations: int, num_bytes: int, speed: float) -> tuple[Recipe, float]:
    """(the recipe, or a smaller one; by how much its micro-batch has fewer operations)."""
    free, fewer = available_memory_bytes() or 1 << 62, operations
    for small in _smaller(recipe):
        if small is not recipe:
            memory = estimate(small, 1)
            fewer, num_bytes = memory.operations, memory.total
        if processes * num_bytes <= _ROOM * free and fewer <= speed * _LONGEST_SECONDS:
            return small, operations / fewer if fewer else 1.0
    raise ConfigError("an update is too large to be timed on this machine")


def _smaller(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe, then with ever half as many samples, then with one and pictures of a half and a quarter of the side:
    the less is scaled, the nearer it comes."""
    yield recipe
    one, samples = recipe, recipe.training.per_device_train_batch_size
    while samples > 1:
        samples //= 2
        one = replace(recipe, training=replace(recipe.training, per_device_train_batch_size=samples))
        yield one
    for part in (2, 4):
        yield replace(one, data=replace(recipe.data, resolution=recipe.data.resolution // part))


def _time(recipe: Recipe, processes: int) -> tuple[float, int]:
    """(the median seconds of an update of one micro-batch, how many were timed)."""
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ppldm-doctor-") as folder, _among(processes):
        alone = {"output_dir": folder, "resume_from_checkpoint": None, "overwrite_output_dir": False,
                 "gradient_accumulation_steps": 1, "global_batch_size": None}  # fmt: skip
        run = prepare(recipe.model, recipe.data, replace(recipe.training, **alone))
        batches = timed_batches(run.batches(), run.interval, run.arguments.data_timeout, run.world.rank)
        guard = UpdateGuard(run.state, run.world, run.arguments.max_skipped_updates, autocast(run.arguments))
        with closing(iter(batches)) as source:
            started = time.perf_counter()
            for batch in source:
                run.state.model.train()
                train_step(guard, [batch])
                now = time.perf_counter()
                seconds.append(now - started)
                started = now
                timed = seconds[_WARM_UPDATES:]
                wanted = _SECONDS if len(timed) >= _LEAST_UPDATES else 3 * _SECONDS
                if sum(timed) > wanted or sum(seconds[1:]) > 6 * _SECONDS or len(timed) == _MOST_UPDATES:
                    break
        del run, guard, batches, source
    gc.collect()
    timed = seconds[_WARM_UPDATES:] or seconds[-1:]
    return median(timed), len(timed)


@contextmanager
def _among(processes: int) -> Iterator[None]:
    """With the threads of one of so many processes, where the user has not set fewer; quiet, for what a training says
    at its start was said by doctor."""
    log, threads = get_logger(), int(read("OMP_NUM_THREADS") or 1)
    level = log.level
    log.setLevel(logging.ERROR)
    paddle.base.core.set_num_threads(min(threads, max(1, count_usable_cores() // processes)))
    try:
        yield
    finally:
        paddle.base.core.set_num_threads(threads)
        log.setLevel(level)
