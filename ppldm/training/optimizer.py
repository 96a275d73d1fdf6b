"""AdamW with its learning rate and precision, for both loops.

O1 keeps float32 weights and computes the operations that gain from it in half precision. O2 keeps the trained weights
in half precision too, with float32 masters in the optimizer, and float32 gradients, so that accumulation loses nothing.
A frozen VAE stays in float32 in both. Reference:
https://www.paddlepaddle.org.cn/documentation/docs/en/guides/performance_improving/amp_en.html
"""

import ctypes
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial

import numpy as np
import paddle
from paddle import _C_ops
from paddle.nn.clip import ClipGradByGlobalNorm, _squared_l2_norm

from ..config.training import LR_SCHEDULES, TrainingOptions, read_lr_steps
from ..networks.cpu_operators import operators
from ..utils.log import get_logger
from ..utils.machine.devices import current_kind

_CHUNK_SIZE = 65536  # elements that a block of the GPU kernel takes at a time, as in Paddle's own tests of it
# Paddle keys the state of a half-precision parameter by its float32 master.
_STATE_KEY = re.compile(r"(.+?)(?:_fp32_master_\d+)?_(?:moment[12]|absmax[12]|beta[12]_pow_acc)_\d+")


def build_optimizer(
    parameters: dict,
    ratios: dict[str, float],
    arguments,
    max_steps: int,
    global_batch_size: int,
    clipped_alone: Collection[str] = (),
    kind: Callable = paddle.optimizer.AdamW,
):
    """(optimizer, its learning rate scheduler) over `parameters` (name to parameter), as the arguments say. Weight
    decay is for all of them, as published, or without `decay_norms_and_biases` for those of two or more dimensions.
    `ratios`: the learning rate of a component, by the name before the first dot, as a multiple of `learning_rate`,
    where it differs. `clipped_alone`: components whose gradients have a norm of their own. `kind`: what makes it."""
    # Linear scaling (Goyal et al. 2017, arXiv:1706.02677): the published 4.6875e-5 is 5e-5 of 512 at 480 samples.
    scale = global_batch_size / arguments.lr_batch_size if arguments.scale_lr else 1.0
    for name, parameter in parameters.items():
        component = name.partition(".")[0]
        own = parameter.optimize_attr.get("rate_factor", 1.0)  # of `methods.mup`
        parameter.optimize_attr["learning_rate"] = ratios.get(component, 1.0) * own
        parameter.optimize_attr["clip_group"] = component if component in clipped_alone else ""
    warmup_steps = arguments.warmup_steps or math.ceil(arguments.warmup_ratio * max_steps)
    for text in describe_limits(arguments, arguments.learning_rate * scale, warmup_steps, max_steps):
        get_logger().warning("%s", text)
    factor = partial(
        lr_factor,
        schedule=arguments.lr_scheduler_type,
        warmup_steps=warmup_steps,
        max_steps=max_steps,
        end_factor=min(1.0, last_rate(arguments) / (arguments.learning_rate * scale)),
        num_cycles=arguments.num_cycles,
        power=arguments.power,
        steps=read_lr_steps(arguments.lr_steps) if arguments.lr_scheduler_type == "piecewise_constant" else (),
    )
    scheduler = paddle.optimizer.lr.LambdaDecay(arguments.learning_rate * scale, factor)
    clip = ClipByGroup(arguments.max_grad_norm) if arguments.max_grad_norm > 0 else None
    decayed = {p.name for p in parameters.values() if arguments.decay_norms_and_biases or p.ndim > 1}
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
    if arguments.sharding in ("stage2", "stage3") and is_sharded(optimizer):
        optimizer.share_gradients()
    return optimizer, scheduler


def lr_factor(
    update: int, schedule: str, warmup_steps: int, max_steps: int, end_factor=0.0, num_cycles=0.5, power=1.0, steps=()
) -> float:
    """The factor on the base learning rate for the `update`-th optimizer update, counted from 0; in [0, 1], or one of
    `steps` (`read_lr_steps`). The first `warmup_steps` updates rise linearly from 0, whatever the schedule. Formulas
    (docs/training.md) and defaults are those of diffusers' and PaddleNLP's `get_scheduler`."""
    if update < warmup_steps:
        return update / warmup_steps
    if schedule in ("constant", "constant_with_warmup"):
        return 1.0
    if schedule == "piecewise_constant":
        return next(factor for end, factor in steps if update < end)
    progress = min(1.0, (update - warmup_steps) / max(1, max_steps - warmup_steps))
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        wave = max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress)))
        return end_factor + (1.0 - end_factor) * wave
    if schedule == "cosine_with_restarts":
        if progress >= 1.0:
            return 0.0
        return 0.5 * (1.0 + math.cos(math.pi * (max(1.0, num_cycles) * progress % 1.0)))
    if schedule == "polynomial":
        return end_factor + (1.0 - end_factor) * (1.0 - progress) ** power
    raise ValueError(f"schedule {schedule!r} is not one of {LR_SCHEDULES}")


def last_rate(arguments) -> float:
    """The learning rate that the schedule falls to."""
    return {"polynomial": arguments.lr_end, "cosine": arguments.min_lr}.get(arguments.lr_scheduler_type, 0.0)


def describe_limits(arguments, rate: float, warmup_steps: int, max_steps: int) -> list[str]:
    """What the settings ask of a schedule with this highest rate that a run of so many updates does not get."""
    found, end = [], last_rate(arguments)
    if warmup_steps >= max_steps:
        reached = max(0, max_steps - 1) / warmup_steps if warmup_steps else 1.0
        text = f"the warm-up of {warmup_steps} updates is no shorter than the run of {max_steps}: the rate ends at "
        found.append(f"{text}{reached:.0%} of {rate:g}; lower --warmup_steps or --warmup_ratio")
    if end > rate:
        flag = "--min_lr" if arguments.lr_scheduler_type == "cosine" else "--lr_end"
        found.append(f"{flag} {end:g} is above the learning rate, {rate:g}, which stays as it is; lower it")
    return found


def learning_rate_ratios(model, config, learning_rate: float) -> tuple[dict[str, float], dict[str, float]]:
    """Component to its learning rate as a multiple of `learning_rate`, and the same by rate group; of those whose
    `<rate group>_learning_rate` is given among the family's settings."""
    groups = {name: one.rate_group for name, one in model.components.items() if one.rate_group}
    rates = {group: getattr(config, f"{group}_learning_rate", None) for group in groups.values()}
    ratios = {group: rate / learning_rate for group, rate in rates.items() if rate is not None}
    return {name: ratios[group] for name, group in groups.items() if group in ratios}, ratios


def autocast(arguments: TrainingOptions):
    """A function that makes the context of the forward pass; one without effect for float32."""
    if not is_mixed(arguments):
        return nullcontext
    lists = {"custom_white_list": arguments.amp_custom_white_list, "custom_black_list": arguments.amp_custom_black_list}
    return partial(paddle.amp.auto_cast, level=arguments.fp16_opt_level, dtype=half_type(arguments), **lists)


def decorate(model, optimizer, arguments: TrainingOptions) -> None:
    """For O2, once all is built: cast in place all components but those that stay in float32."""
    if is_mixed(arguments) and arguments.fp16_opt_level == "O2":
        half = half_type(arguments)
        paddle.amp.decorate(_cast_layers(model), optimizer, level="O2", dtype=half, master_grad=True)


def restore_float32(model, optimizer) -> None:
    """Undo the casts of O2 when training is over: each weight becomes its float32 master again. A collective call."""
    masters = master_weights(optimizer)
    if not masters:
        return
    for layer in _cast_layers(model):
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


class FusedAdamW(paddle.optimizer.AdamW):
    """`paddle.optimizer.AdamW` through Paddle's `fused_adam_` kernel, which Paddle 3.3 has and does not use: one launch
    for the parameters of one type, rate and weight decay. Only the last bits of its results differ."""

    def _create_optimization_pass(self, *args, **kwargs):
        self._groups: dict[tuple, list] = {}
        done = super()._create_optimization_pass(*args, **kwargs)
        for (_, _, with_master, with_decay, _), (rate, *members) in self._groups.items():
            self._update(rate, [list(column) for column in zip(*members, strict=True)], with_master, with_decay)
        self._groups = {}
        return done

    def _append_optimize_op(self, block, param_and_grad):
        """AdamW's own, put off until all parameters are known."""
        if isinstance(param_and_grad, dict):
            param_and_grad = self._update_param_group(param_and_grad)
        parameter, gradient = param_and_grad
        with_master = self._multi_precision and self._is_dtype_fp16_or_bf16(parameter.dtype)
        with_decay = self._apply_decay_param_fun is None or self._apply_decay_param_fun(parameter.name)
        ratio = parameter.optimize_attr["learning_rate"]
        # Of those that began at one update: the kernel takes the powers of its first parameter for all.
        key = (parameter.dtype, ratio, with_master, with_decay, parameter.optimize_attr.get("clip_group"))
        names = (self._moment1_acc_str, self._moment2_acc_str, self._beta1_pow_acc_str, self._beta2_pow_acc_str)
        state = [self._get_accumulator_master(name, parameter) for name in names]
        group = self._groups.setdefault(key, [self._create_param_lr(param_and_grad)])
        group.append((parameter, gradient, *state, self._master_weights.get(parameter.name)))

    def _update(self, rate, columns: list[list], with_master: bool, with_decay: bool) -> None:
        parameters, gradients, first, second, power1, power2, masters = columns
        _C_ops.fused_adam_(
            *(parameters, gradients, rate, first, second, None, power1, power2, masters if with_master else None, None),
            *(self._beta1, self._beta2, self._epsilon, _CHUNK_SIZE, self._weight_decay if with_decay else 0.0),
            *(True, with_master, False, False),  # decoupled decay, float32 masters, powers of their own, no AMSGrad
        )


class CpuAdamW(FusedAdamW):
    """The same of float32 parameters on a CPU, in one pass over memory; its betas are in float32, like their powers."""

    def _update(self, rate, columns: list[list], with_master: bool, with_decay: bool) -> None:
        parameters, gradients, first, second, powers1, powers2, _ = columns
        powers, betas = (float(powers1[0]), float(powers2[0])), np.float32([self._beta1, self._beta2]).tolist()
        settings = float(rate), betas, powers, self._epsilon, self._weight_decay if with_decay else 0.0
        operators.update_by_adamw(parameters, gradients, first, second, *settings)
        for power, beta in [(one, self._beta1) for one in powers1] + [(one, self._beta2) for one in powers2]:
            held = ctypes.c_float.from_address(power.data_ptr())
            held.value = float(np.float32(held.value) * np.float32(beta))


class ClipByGroup(ClipGradByGlobalNorm):
    """Scales gradients down where the norm of their group of parameters (`build_optimizer`) is above `clip_norm`; most
    often there is one group. squares: what `squared_norms` gave of them, if somebody has asked already."""

    squares: tuple[list, list] | None = None

    @paddle.no_grad()
    def _dygraph_clip(self, params_grads):
        parameters, squares = self.squares or squared_norms([parameter for parameter, _ in params_grads])
        self.squares, factors, groups = None, {}, {}
        for parameter, square in zip(parameters, squares, strict=True):
            groups.setdefault(group_of(parameter), []).append(square)
        for group, members in groups.items():
            norm = paddle.stack(members).sum().sqrt()  # in the order of ClipGradByGlobalNorm, whose bits these are
            if norm > self.clip_norm:
                factors[group] = self.clip_norm / norm
        for parameter, gradient in params_grads:
            if group_of(parameter) in factors:
                gradient.multiply_(factors[group_of(parameter)])
        return params_grads


@paddle.no_grad()
def squared_norms(parameters: list, optimizer=None) -> tuple[list, list]:
    """(those that have a gradient, the squared L2 norm of each of these, float32 []; not finite where one element is
    not), the faster way where `optimizer` is a `CpuAdamW`."""
    learned = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in learned]
    if isinstance(optimizer, CpuAdamW):
        return learned, operators.squared_norms(gradients)
    # paddle.linalg.norm takes 12 times as long.
    return learned, [_squared_l2_norm(gradient.astype("float32")).reshape([]) for gradient in gradients]


def norm_of(squares: list):
    """The norm of gradients of which these are the squared ones, float32 []; 0 of none."""
    return paddle.add_n(squares).sqrt() if squares else paddle.zeros([])


def group_of(parameter) -> str:
    """The group of `build_optimizer` by whose norm its gradient is clipped."""
    return parameter.optimize_attr.get("clip_group", "")


def parameter_of(key: str) -> str | None:
    """The parameter whose state `key` names in the `state_dict` of an optimizer; None for what belongs to none."""
    match = _STATE_KEY.fullmatch(key)
    return match and match[1]


def matrices_of(optimizer) -> set[str]:
    """The parameters that Muon updates, by Paddle's name; none but with `--optimizer muon`."""
    return set(getattr(optimizer, "matrices", ()))


def in_8_bits(optimizer) -> set[str]:
    """The parameters whose moments are kept in 8 bits, by Paddle's name; none but with `--optimizer adamw8bit`."""
    return set(getattr(optimizer, "in_8_bits", ()))


def has_master(optimizer, parameter) -> bool:
    """Whether the optimizer updates a float32 master of this parameter."""
    return optimizer._multi_precision and optimizer._is_dtype_fp16_or_bf16(parameter.dtype)


def gradient_shares(optimizer):
    """The `GradientShares` that reduce the gradients of its parameters to their owners; None below stage 2."""
    return getattr(optimizer, "gradients", None)


def master_weights(optimizer) -> Mapping:
    """Float32 values of half-precision parameters by Paddle's name. With shares a look-up is a collective call."""
    return optimizer.all_masters() if is_sharded(optimizer) else optimizer._master_weights


def is_sharded(optimizer) -> bool:
    """Whether it is a `ShardedOptimizer`, whose module is imported only where one is asked for."""
    return hasattr(optimizer, "all_masters")
