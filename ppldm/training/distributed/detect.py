"""The ranks of a run, found at its start and watched from then on."""

import paddle

from ...config.training import TrainingOptions
from ...utils.log import get_logger
from ...utils.machine.cpu import quiet_paddle
from ...utils.machine.devices import DEFAULT_DEVICE, device_name, use_device
from ...utils.processes.rank_watch import watch_ranks
from ...utils.processes.world import World
from ...utils.text import count_of
from ..speed import apply_switches


def detect_world(arguments: TrainingOptions) -> World:
    """The ranks of this run, which can talk to each other from now on, on the device that is asked for.

    Raises ConfigError for a device that there is not.
    """
    world = World.detect()
    use_device(None if arguments.device == DEFAULT_DEVICE else arguments.device)
    if world.size > 1:
        with quiet_paddle():
            paddle.distributed.init_parallel_env()
    watch_ranks(world, arguments.rank_timeout)
    apply_switches(arguments)
    per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * world.size
    get_logger().info(
        "global_batch_size %d = %d per device x %d accumulation x %s on %s",
        *(per_step, arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps),
        *(count_of(world.size, "rank"), device_name()),
    )
    return world
