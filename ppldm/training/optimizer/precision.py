"""Mixed precision: float16 and bfloat16, O1 and O2, the same for both loops.

O1 keeps float32 weights and computes the operations that gain from it in half precision. O2 keeps the trained weights
in half precision too, with float32 masters in the optimizer, and float32 gradients, so that accumulation loses nothing.
The VAE stays in float32 in both. Reference: https://www.paddlepaddle.org.cn/documentation/docs/en/guides/performance_improving/amp_en.html
"""

from contextlib import nullcontext
from functools import partial

import paddle

from ...utils.log import get_logger
from ..arguments import LDMTrainingArguments
from ..checkpoint.checkpoint import TrainingState
from .sharding import master_weights


def autocast(arguments: LDMTrainingArguments):
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


def decorate(model, optimizer, arguments: LDMTrainingArguments) -> None:
    """Cast UNet and text encoder for O2, in place, once all is built; nothing for O1 and float32."""
    if is_mixed(arguments) and arguments.fp16_opt_level == "O2":
        paddle.amp.decorate(
            models=[model.unet, model.text_encoder],
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
    for part in (state.model.unet, state.model.text_encoder):
        part.to(dtype="float32")
        for parameter in part.parameters():
            if parameter.name in masters:
                parameter.set_value(masters[parameter.name])


def make_scaler(arguments: LDMTrainingArguments) -> paddle.amp.GradScaler | None:
    """float16's loss scaler, which starts at `--scale_loss`."""
    if not arguments.fp16 or not is_mixed(arguments):
        return None
    return paddle.amp.GradScaler(init_loss_scaling=arguments.scale_loss)


def is_mixed(arguments: LDMTrainingArguments) -> bool:
    """True where half precision is asked for and to be had: Paddle has none on a CPU."""
    return (arguments.fp16 or arguments.bf16) and paddle.is_compiled_with_cuda() and paddle.get_device() != "cpu"


def warn_of_cpu(arguments: LDMTrainingArguments) -> None:
    """Say so where `--fp16` or `--bf16` cannot have an effect."""
    if (arguments.fp16 or arguments.bf16) and not is_mixed(arguments):
        get_logger().warning("Paddle has no mixed precision on a CPU: --fp16 and --bf16 do nothing, this is float32")


def precision_name(arguments: LDMTrainingArguments) -> str:
    """What is computed in: float32, or the half type and its level."""
    return f"{half_type(arguments)} {arguments.fp16_opt_level}" if is_mixed(arguments) else "float32"


def half_type(arguments: LDMTrainingArguments) -> str:
    """Paddle's name of the half type."""
    return "bfloat16" if arguments.bf16 else "float16"
