"""The ranks of a run, found at its start and watched from then on."""

import paddle

from ...utils.log import get_logger
from ...utils.rank_watch import watch_ranks
from ...utils.text import count_of
from ...utils.world import World
from ..arguments import LDMTrainingArguments
from ..speed import apply_switches


def detect_world(arguments: LDMTrainingArguments) -> World:
    """The ranks of this run. PaddleNLP's arguments have started the communication already."""
    world = World.detect()
    watch_ranks(world, arguments.rank_timeout)
    apply_switches(arguments)
    per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * world.size
    get_logger().info(
        "global_batch_size %d = %d per device x %d accumulation x %s on %s",
        *(per_step, arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps),
        *(count_of(world.size, "rank"), paddle.get_device()),
    )
    return world
