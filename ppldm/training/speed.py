"""Switches that trade bits for speed on NVIDIA GPUs (docs/training.md): each is off unless its flag is given.

Paddle's own defaults are faster and less exact: TF32 is on where the GPU has it. Here float32 means float32.
"""

import paddle
from paddle.base import core

from ..utils.log import get_logger
from .arguments import LDMTrainingArguments

GPU_SWITCHES = ("tf32", "cudnn_search")


def apply_switches(arguments: LDMTrainingArguments) -> None:
    """Set what the flags ask for, in this process; on a CPU say that they do nothing there."""
    if not paddle.get_device().startswith("gpu"):
        for name in GPU_SWITCHES:
            if getattr(arguments, name):
                get_logger().warning("--%s does nothing on a CPU", name)
        return
    core.set_cublas_switch(arguments.tf32)
    core.set_cudnn_switch(arguments.tf32)
    paddle.set_flags({"FLAGS_cudnn_exhaustive_search": arguments.cudnn_search})
