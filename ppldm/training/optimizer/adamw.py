"""AdamW with its learning rate, the same for both loops: schedules, linear scaling, and rates that a component has
for itself."""

import math
from collections.abc import Collection
from functools import partial

import paddle

from ...config.training import LR_SCHEDULES
from ...utils.log import get_logger
from ...utils.processes.world import World
from .fused_adamw import FusedAdamW
from .sharding import ClipByGroup, ShardedAdamW, ShardedFusedAdamW


def build_optimizer(
    parameters: dict,
    ratios: dict[str, float],
    arguments,
    max_steps: int,
    global_batch_size: int,
    world: World,
    clipped_alone: Collection[str] = (),
):
    """(AdamW, its learning rate scheduler) over `parameters` (name to parameter), as the training arguments say.

    Weight decay applies to all parameters, as published, or with `decay_norms_and_biases` false to those of two or
    more dimensions. No clipping unless `max_grad_norm` is above 0. `ratios`: the learning rate of a component, by the
    name before the first dot, as a multiple of `learning_rate`, where it differs; under the same schedule.
    `clipped_alone`: components whose gradients have a norm of their own. With `sharding` each rank of `world` has a
    share.
    """
    scale = scaled_learning_rate(1.0, global_batch_size, arguments.lr_batch_size) if arguments.scale_lr else 1.0
    for name, parameter in parameters.items():
        component = name.partition(".")[0]
        parameter.optimize_attr["learning_rate"] = ratios.get(component, 1.0)
        parameter.optimize_attr["clip_group"] = component if component in clipped_alone else ""
    warmup_steps = arguments.warmup_steps or math.ceil(arguments.warmup_ratio * max_steps)
    for text in describe_limits(arguments, arguments.learning_rate * scale, warmup_steps, max_steps):
        get_logger().warning("%s", text)
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
    clip = ClipByGroup(arguments.max_grad_norm) if arguments.max_grad_norm > 0 else None
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


def describe_limits(arguments, rate: float, warmup_steps: int, max_steps: int) -> list[str]:
    """What the settings ask of a schedule with this highest rate that a run of so many updates does not get."""
    found = []
    if warmup_steps >= max_steps:
        reached = max(0, max_steps - 1) / warmup_steps if warmup_steps else 1.0
        found.append(f"the warm-up of {warmup_steps} updates is no shorter than the run of {max_steps}: the rate "
                     f"ends at {reached:.0%} of {rate:g}; lower --warmup_steps or --warmup_ratio")  # fmt: skip
    if arguments.lr_scheduler_type == "polynomial" and arguments.lr_end > rate:
        found.append(
            f"--lr_end {arguments.lr_end:g} is above the learning rate, {rate:g}, which stays as it is; lower it"
        )
    return found


def scaled_learning_rate(learning_rate: float, global_batch_size: int, lr_batch_size: int) -> float:
    """Linear scaling (Goyal et al. 2017, arXiv:1706.02677): the published 4.6875e-5 is 5e-5 of 512 at 480 samples."""
    return learning_rate * global_batch_size / lr_batch_size


def learning_rate_ratios(model, config, learning_rate: float) -> tuple[dict[str, float], dict[str, float]]:
    """Component to its learning rate as a multiple of `learning_rate`, and the same by rate group; of those whose
    `<rate group>_learning_rate` is given among the family's settings."""
    groups = {name: one.rate_group for name, one in model.components.items() if one.rate_group}
    rates = {group: getattr(config, f"{group}_learning_rate", None) for group in groups.values()}
    ratios = {group: rate / learning_rate for group, rate in rates.items() if rate is not None}
    return {name: ratios[group] for name, group in groups.items() if group in ratios}, ratios
