"""Checks of training flags, one at a time."""

import math

from paddlenlp.utils.profiler import ProfilerOptions

from ..utils.errors import ConfigError
from ..utils.log import get_logger
from ..utils.machine import count_usable_cores
from ..utils.rng import MAX_SEED
from ..utils.text import count_of

SHARDING_STAGES = ("stage1", "stage2")
_MOST_WORKERS, _MOST_WORKERS_A_CORE = 128, 8


# What a number must be: in words, as a condition, and the flags.
_RANGES = (
    ("above 0", lambda value: value > 0, (
        "per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps", "save_steps", "max_samples",
        "max_skipped_updates", "lr_batch_size", "learning_rate", "unet_learning_rate", "text_encoder_learning_rate",
        "scale_loss", "num_cycles", "power",
    )),
    ("0 or more", lambda value: value >= 0, (
        "weight_decay", "adam_epsilon", "warmup_steps", "lr_end", "dataloader_num_workers", "backup_every",
        "save_total_limit", "check_ranks_every", "data_timeout", "rank_timeout",
    )),
    (f"from 0 to {MAX_SEED}", lambda value: 0 <= value <= MAX_SEED, ("seed",)),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2")),
    ("a number", lambda value: True, ("max_grad_norm", "num_train_epochs")),
)  # fmt: skip


def check_ranges(arguments) -> None:
    """Raises ConfigError for a number that is not finite or out of its range."""
    for words, holds, names in _RANGES:
        for name in names:
            value = getattr(arguments, name)
            if value is not None and not ((isinstance(value, int) or math.isfinite(value)) and holds(value)):
                raise ConfigError(f"--{name} {value} must be {words}")


def check_training(arguments) -> None:
    """Raises ConfigError for all that the functions below find."""
    check_precision(arguments)
    if arguments.profiler_options:
        check_profiler_options(arguments.profiler_options)
    check_sharding(arguments)
    check_workers(arguments.dataloader_num_workers)


def check_profiler_options(text: str) -> None:
    """Raises ConfigError for what PaddleNLP's profiler does not take, or what would end the run."""
    try:
        ProfilerOptions(text)
    except ValueError as error:
        raise ConfigError(
            f'--profiler_options {text} is not understood; write "batch_range=[10,20];profile_path=model.profile"'
        ) from error
    if "exit_on_finished" in text:
        raise ConfigError(
            "--profiler_options exit_on_finished would end the run without a checkpoint; omit it: training goes "
            "on after the profile"
        )


def check_precision(arguments) -> None:
    """Raises ConfigError for kinds of computing that do not go together."""
    if arguments.to_static and arguments.recompute:
        raise ConfigError(
            "--to_static with --recompute: a compiled model keeps its activations, so that nothing is recomputed; "
            "omit one of them"
        )
    if arguments.fp16_opt_level not in ("O1", "O2"):
        raise ConfigError(f"--fp16_opt_level {arguments.fp16_opt_level} must be O1 or O2; omit --fp16 for float32")


def check_sharding(arguments) -> None:
    """Raises ConfigError for all but no sharding and the stages that are built, and for what stage 2 cannot yet."""
    sharding = arguments.sharding
    if any(word in ("stage3", "offload") for word in sharding.split()):
        raise ConfigError(
            f"--sharding {sharding} is not supported: Paddle cuts weights on GPUs only, and saves files for each rank "
            "that no other number of ranks can read; use --sharding stage2"
        )
    if sharding not in ("", *SHARDING_STAGES):
        raise ConfigError(f"--sharding {sharding} is not known; use stage1 or stage2, or omit it")
    halves = arguments.fp16 or (arguments.bf16 and arguments.fp16_opt_level == "O2")
    if sharding == "stage2" and (halves or arguments.to_static):
        what = "gradients in half precision" if halves else "--to_static"
        raise ConfigError(f"--sharding stage2 was never run with {what}; use --sharding stage1")


def check_workers(num_workers: int) -> None:
    """Raises ConfigError for more loader processes than anybody can mean; `warn_of_workers` is for the rest."""
    most = max(_MOST_WORKERS, _MOST_WORKERS_A_CORE * count_usable_cores())
    if num_workers > most:
        raise ConfigError(
            f"--dataloader_num_workers {num_workers}: this machine has {count_of(count_usable_cores(), 'core')}; "
            f"give as many, and at most {most}"
        )


def warn_of_workers(num_workers: int) -> None:
    """Say where loader processes are more than the cores."""
    if num_workers > count_usable_cores():
        get_logger().warning(
            "--dataloader_num_workers %d is above the %s of this machine: each takes memory, and they take turns",
            num_workers, count_of(count_usable_cores(), "core"),
        )  # fmt: skip
