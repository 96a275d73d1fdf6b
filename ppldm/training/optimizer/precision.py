"""Mixed precision: float16 and bfloat16, O1 and O2, the same for both loops.

O1 keeps float32 weights and computes the operations that gain from it in half precision. O2 keeps the trained weights
in half precision too, with float32 masters in the optimizer, and float32 gradients, so that accumulation loses nothing.
A frozen VAE stays in float32 in both. Reference: https://www.paddlepaddle.org.cn/documentation/docs/en/guides/performance_improving/amp_en.html
"""

from contextlib import nullcontext
from functools import partial

import paddle

from ...config.training import TrainingOptions
from ...utils.log import get_logger
from ...utils.machine.devices import current_kind
from ..checkpoint.checkpoint import TrainingState
from .sharding import master_weights


def autocast(arguments: TrainingOptions):
    """A function that makes the context of the forward pass; one without effect for float32."""
    if not is_mixed(arguments):
        return nullcontext
    return partial(
        paddle.amp.auto_cast,
        custom_white_list=arguments.amp_custom_white_list,
        custom_black_list=arguments.amp_custom_black_list,
        level=arguments.fp16_opt_level,
        dtype=half_type(arguments),
    )


def decorate(model, optimizer, arguments: TrainingOptions) -> None:
    """Cast for O2 all components but those that stay in float32, in place, once all is built; nothing for O1 and
    float32."""
    if is_mixed(arguments) and arguments.fp16_opt_level == "O2":
        paddle.amp.decorate(
            models=_cast_layers(model),
            optimizers=optimizer,
            level="O2",
            dtype=half_type(arguments),
            master_grad=True,
        )


def restore_float32(state: TrainingState) -> None:
    """Undo the casts of O2 when training is over: each weight becomes its float32 master again. A collective call."""
    masters = master_weights(state.optimizer)
    if not masters:
        return
    for layer in _cast_layers(state.model):
        layer.to(dtype="float32")
        for parameter in layer.parameters():
            if parameter.name in masters:
                parameter.set_value(masters[parameter.name])


def _cast_layers(model) -> list:
    return [component.layer for component in model.components.values() if not component.stays_float32]


def make_scaler(arguments: TrainingOptions) -> paddle.amp.GradScaler | None:
    """float16's loss scaler, which starts at `--scale_loss`."""
    if not arguments.fp16 or not is_mixed(arguments):
        return None
    return paddle.amp.GradScaler(init_loss_scaling=arguments.scale_loss)


def is_mixed(arguments: TrainingOptions) -> bool:
    """True where half precision is asked for and the device has it: Paddle has none on a CPU. An
    accelerator that refuses it has ended the run (`devices.check_precision`)."""
    return (arguments.fp16 or arguments.bf16) and current_kind().mixed_precision


def warn_of_cpu(arguments: TrainingOptions) -> None:
    """Say so where `--fp16` or `--bf16` cannot have an effect."""
    if (arguments.fp16 or arguments.bf16) and not is_mixed(arguments):
        words = current_kind().words
        get_logger().warning(f"Paddle has no mixed precision on {words}: --fp16 and --bf16 do nothing, this is float32")


def precision_name(arguments: TrainingOptions) -> str:
    """What is computed in: float32, or the half type and its level."""
    return f"{half_type(arguments)} {arguments.fp16_opt_level}" if is_mixed(arguments) else "float32"


def half_type(arguments: TrainingOptions) -> str:
    """Paddle's name of the half type."""
    return "bfloat16" if arguments.bf16 else "float16"
