"""Optimizer and learning rate, the same for both loops. One unit everywhere: the optimizer update."""

import math
from functools import partial

import paddle

LR_SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
)


POLYNOMIAL_END_LR = 1e-7  # the default of diffusers' and PaddleNLP's polynomial schedule; its default power is 1


def lr_factor(update: int, schedule: str, warmup_steps: int, max_steps: int, end_factor: float = 0.0) -> float:
    """The factor on the base learning rate for the `update`-th optimizer update, counted from 0; in [0, 1].

    The first `warmup_steps` updates rise linearly from 0, whatever the schedule; then `constant` and
    `constant_with_warmup` stay at 1, `linear` falls to 0 at `max_steps`, `cosine` along half a cosine,
    `cosine_with_restarts` too (one cycle, diffusers' default), `polynomial` linearly to `end_factor`.
    """
    if update < warmup_steps:
        return update / warmup_steps
    if schedule in ("constant", "constant_with_warmup"):
        return 1.0
    progress = min(1.0, (update - warmup_steps) / max(1, max_steps - warmup_steps))
    if schedule == "linear":
        return 1.0 - progress
    if schedule in ("cosine", "cosine_with_restarts"):
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule == "polynomial":
        return end_factor + (1.0 - end_factor) * (1.0 - progress)
    raise ValueError(f"schedule {schedule!r} is not one of {LR_SCHEDULES}")


def build_optimizer(parameters: list, arguments, max_steps: int):
    """(AdamW, its learning rate scheduler) over `parameters`, as the training arguments say.

    Weight decay applies to all parameters, norms and biases included, as published. No clipping unless
    `max_grad_norm` is above 0.
    """
    warmup_steps = arguments.warmup_steps or math.ceil(arguments.warmup_ratio * max_steps)
    scheduler = paddle.optimizer.lr.LambdaDecay(
        learning_rate=arguments.learning_rate,
        lr_lambda=partial(
            lr_factor,
            schedule=arguments.lr_scheduler_type,
            warmup_steps=warmup_steps,
            max_steps=max_steps,
            end_factor=min(1.0, POLYNOMIAL_END_LR / arguments.learning_rate),
        ),
    )
    clip = paddle.nn.ClipGradByGlobalNorm(arguments.max_grad_norm) if arguments.max_grad_norm > 0 else None
    optimizer = paddle.optimizer.AdamW(
        learning_rate=scheduler,
        beta1=arguments.adam_beta1,
        beta2=arguments.adam_beta2,
        epsilon=arguments.adam_epsilon,
        weight_decay=arguments.weight_decay,
        parameters=parameters,
        grad_clip=clip,
    )
    return optimizer, scheduler
