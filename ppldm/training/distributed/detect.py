"""The ranks of a run, found at its start and watched from then on."""

from ...config.training import TrainingOptions
from ...utils import variables
from ...utils.log import get_logger
from ...utils.machine.devices import (
    check_precision,
    collective_variables,
    current_device,
    current_kind,
    installed_kind,
    set_exactness,
    use_device,
)
from ...utils.processes.meeting import join
from ...utils.processes.rank_watch import watch_ranks
from ...utils.processes.world import World
from ...utils.text import count_of


def detect_world(arguments: TrainingOptions) -> World:
    """The ranks of this run, which can talk to each other from now on, on the device that is asked for.

    `arguments` get the accumulation that --global_batch_size asks for. Raises ConfigError for a device that there is
    not, or that cannot do what is asked of it, and for a batch that cannot be.
    """
    world = World.detect()
    arguments.gradient_accumulation_steps = arguments.accumulation_for(world.size)
    use_device(arguments.device)
    if world.size > 1:
        if (kind := current_kind()) != installed_kind():  # the CPU, asked for where Paddle is made for more
            variables.set_for_libraries(collective_variables(kind), replace=True)
        join(world, arguments.rank_timeout)
    watch_ranks(world, arguments.rank_timeout)
    device = current_device()
    check_precision(arguments.bf16, arguments.fp16, device)
    apply_switches(arguments)
    get_logger().info(
        "global_batch_size %d = %d per device x %d accumulation x %s on %s",
        *(arguments.samples_of_update(world.size), arguments.per_device_train_batch_size),
        *(arguments.gradient_accumulation_steps, count_of(world.size, "rank"), device.name),
    )
    return world


SWITCHES = ("tf32", "cudnn_search")


def apply_switches(arguments: TrainingOptions) -> None:
    """Set what the flags ask for, in this process; say so where they do nothing."""
    kind = current_kind()
    if not kind.exactness_switches:
        for name in SWITCHES:
            if getattr(arguments, name):
                get_logger().warning("--%s does nothing on %s", name, kind.words)
    set_exactness(arguments.tf32, arguments.cudnn_search)
