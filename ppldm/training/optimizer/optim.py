"""Optimizer and learning rate, the same for both loops. One unit everywhere: the optimizer update."""

import math
from functools import partial

import paddle

from ...utils.log import get_logger
from ...utils.world import World
from .fused_adamw import FusedAdamW
from .sharding import ShardedAdamW, ShardedFusedAdamW

LR_SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
)


def lr_factor(
    update: int,
    schedule: str,
    warmup_steps: int,
    max_steps: int,
    end_factor: float = 0.0,
    num_cycles: float = 0.5,
    power: float = 1.0,
) -> float:
    """The factor on the base learning rate for the `update`-th optimizer update, counted from 0; in [0, 1].

    The first `warmup_steps` updates rise linearly from 0, whatever the schedule. Then, with p going from 0 to 1 between
    warm-up and `max_steps`:

        constant, constant_with_warmup   1
        linear                           1 - p
        cosine                           (1 + cos(2 pi num_cycles p)) / 2; 0.5 cycles fall to 0 once
        cosine_with_restarts             (1 + cos(pi (c p mod 1))) / 2, c = num_cycles, at least 1; 0 at the end
        polynomial                       end_factor + (1 - end_factor) (1 - p)^power

    Formulas and defaults are those of diffusers' and PaddleNLP's `get_scheduler`.
    """
    if update < warmup_steps:
        return update / warmup_steps
    if schedule in ("constant", "constant_with_warmup"):
        return 1.0
    progress = min(1.0, (update - warmup_steps) / max(1, max_steps - warmup_steps))
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress)))
    if schedule == "cosine_with_restarts":
        if progress >= 1.0:
            return 0.0
        return 0.5 * (1.0 + math.cos(math.pi * (max(1.0, num_cycles) * progress % 1.0)))
    if schedule == "polynomial":
        return end_factor + (1.0 - end_factor) * (1.0 - progress) ** power
    raise ValueError(f"schedule {schedule!r} is not one of {LR_SCHEDULES}")


def scaled_learning_rate(learning_rate: float, global_batch_size: int, lr_batch_size: int) -> float:
    """Linear scaling (Goyal et al. 2017, arXiv:1706.02677): the published 4.6875e-5 is 5e-5 of 512 at 480 samples."""
    return learning_rate * global_batch_size / lr_batch_size


def build_optimizer(parameters: dict, arguments, max_steps: int, global_batch_size: int, world: World):
    """(AdamW, its learning rate scheduler) over `parameters` (name to parameter), as the training arguments say.

    Weight decay applies to all parameters, as published, or with `decay_norms_and_biases` false to those of two or
    more dimensions. No clipping unless `max_grad_norm` is above 0. Parameters under `unet.` and `text_encoder.` may
    have a learning rate of their own, under the same schedule. With `sharding` each rank of `world` has a share.
    """
    scale = scaled_learning_rate(1.0, global_batch_size, arguments.lr_batch_size) if arguments.scale_lr else 1.0
    for name, parameter in parameters.items():
        part = name.partition(".")[0]
        parameter.optimize_attr["learning_rate"] = learning_rate_groups(arguments).get(part, 1.0)
    warmup_steps = arguments.warmup_steps or math.ceil(arguments.warmup_ratio * max_steps)
    scheduler = paddle.optimizer.lr.LambdaDecay(
        learning_rate=arguments.learning_rate * scale,
        lr_lambda=partial(
            lr_factor,
            schedule=arguments.lr_scheduler_type,
            warmup_steps=warmup_steps,
            max_steps=max_steps,
            end_factor=min(1.0, arguments.lr_end / (arguments.learning_rate * scale)),
            num_cycles=arguments.num_cycles,
            power=arguments.power,
        ),
    )
    clip = paddle.nn.ClipGradByGlobalNorm(arguments.max_grad_norm) if arguments.max_grad_norm > 0 else None
    decayed = {p.name for p in parameters.values() if arguments.decay_norms_and_biases or p.ndim > 1}
    if arguments.sharding and world.size > 1:
        kind = partial(ShardedFusedAdamW if arguments.fused_adamw else ShardedAdamW, world=world)
    else:
        kind = FusedAdamW if arguments.fused_adamw else paddle.optimizer.AdamW
    if arguments.sharding and world.size == 1:
        get_logger().info("--sharding %s does nothing here: there is one rank", arguments.sharding)
    optimizer = kind(
        learning_rate=scheduler,
        beta1=arguments.adam_beta1,
        beta2=arguments.adam_beta2,
        epsilon=arguments.adam_epsilon,
        weight_decay=arguments.weight_decay,
        parameters=list(parameters.values()),
        apply_decay_param_fun=decayed.__contains__,
        grad_clip=clip,
    )
    if arguments.sharding == "stage2" and world.size > 1:
        optimizer.share_gradients()
    return optimizer, scheduler


def learning_rate_groups(arguments) -> dict[str, float]:
    """Part of the model to its learning rate, as a multiple of `learning_rate`; of those that have one of their own."""
    rates = {"unet": arguments.unet_learning_rate, "text_encoder": arguments.text_encoder_learning_rate}
    return {part: rate / arguments.learning_rate for part, rate in rates.items() if rate is not None}
