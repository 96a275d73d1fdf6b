"""AdamW with its learning rate, the same for both loops."""

import math
from collections.abc import Collection
from functools import partial

import paddle

from ...utils.log import get_logger
from ...utils.processes.world import World
from .fused_adamw import FusedAdamW
from .gradient_shares import ClipByGroup
from .learning_rate import describe_limits, lr_factor, scaled_learning_rate
from .sharding import ShardedAdamW, ShardedFusedAdamW


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
