"""Learning rates, in optimizer updates: schedules, linear scaling, and rates that a component has for itself."""

import math

from ...config.training import LR_SCHEDULES


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
