"""Switches that trade bits for speed (docs/training.md): each is off unless its flag is given."""

from ..config.training import TrainingOptions
from ..utils.log import get_logger
from ..utils.machine.devices import current_kind, set_exactness

SWITCHES = ("tf32", "cudnn_search")


def apply_switches(arguments: TrainingOptions) -> None:
    """Set what the flags ask for, in this process; say so where they do nothing."""
    kind = current_kind()
    if not kind.exactness_switches:
        for name in SWITCHES:
            if getattr(arguments, name):
                get_logger().warning("--%s does nothing on %s", name, kind.words)
    set_exactness(arguments.tf32, arguments.cudnn_search)
