"""How a run trains: budget, batch, learning rates, precision, checkpoints, logging. No paddle here.

Most names and defaults are those of PaddleNLP's Trainer; `training/trainer.py` makes its arguments from these.
"""

import math
import os
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from ..utils.errors import ConfigError
from ..utils.files import cache_dir, check_address, is_address, local_path
from ..utils.machine.devices import DEFAULT_DEVICE, DEVICE_HELP
from ..utils.machine.resources import count_usable_cores
from ..utils.rng import MAX_SEED
from ..utils.text import count_of
from .data import VALIDATION
from .option import (
    ABOVE_0,
    FROM_0,
    REQUIRED,
    Bounds,
    Needs,
    NotNegative,
    Positive,
    Samples,
    Seconds,
    Share,
    SmallShare,
    Updates,
    UpdatesOr0,
    option,
)

LR_SCHEDULES = (
    *("constant", "constant_with_warmup", "piecewise_constant"),
    *("linear", "cosine", "cosine_with_restarts", "polynomial"),
)
LARGEST_STD = 0.28  # of an average; at 0.289 it is one of all updates alike
SHARDING_STAGES = ("stage1", "stage2", "stage3")
AT_A_TIME = 0.25  # with stage 3: of a rank's share, the parameters that are gathered at a time, but for one large layer
OPTIMIZERS = ("adamw", "adamw8bit", "muon")
# The package that each place of --report_to needs.
PACKAGES = {"visualdl": "visualdl", "tensorboard": "tensorboardX", "wandb": "wandb", "comet_ml": "comet_ml"}
REPORTERS = (*PACKAGES, "all", "none")
_MOST_WORKERS, _MOST_WORKERS_A_CORE = 128, 8
_MOST = 10**15  # of updates and samples: with accumulation they are still counted in 64 bits

_run = option
_optimizer = partial(option, section="optimizer", identity=True)
_compute = partial(option, section="compute")
_half = partial(_compute, part_of="precision")
_batch = partial(option, part_of="global_batch_size")
_length = partial(option, part_of="max_steps")
_logging = partial(option, section="logging")
_validation = partial(option, section="validation")

_NO_TOTAL = Needs("--global_batch_size", lambda given: given.global_batch_size is None, beside=True)
_NO_LENGTH = Needs("--max_steps or --max_samples", lambda one: one.max_steps <= 0 and one.max_samples is None, True)
_NO_WARMUP = Needs("--warmup_steps", lambda given: not given.warmup_steps, beside=True)
_COSINE = Needs("--lr_scheduler_type cosine or cosine_with_restarts", lambda one: "cosine" in one.lr_scheduler_type)
_ONE_COSINE = Needs("--lr_scheduler_type cosine", lambda given: given.lr_scheduler_type == "cosine")
_PIECEWISE = Needs("--lr_scheduler_type piecewise_constant", lambda one: one.lr_scheduler_type == "piecewise_constant")
_MUON = Needs("--optimizer muon", lambda given: given.optimizer == "muon")
_HUB = Needs("--push_to_hub", lambda given: given.push_to_hub)
_MIXED = Needs("--bf16 or --fp16", lambda given: given.bf16 or given.fp16)
_POLYNOMIAL = Needs("--lr_scheduler_type polynomial", lambda given: given.lr_scheduler_type == "polynomial")
_PICTURES = Needs("--image_logging_steps above 0", lambda given: getattr(given, "image_logging_steps", 1) > 0)


@dataclass(kw_only=True)
class TrainingOptions:
    """The settings of training that no family or data set owns."""

    output_dir: str = _run(REQUIRED, loop_default="./output-model", kind="path")
    """Folder of the run: checkpoints, metrics.jsonl, samples and the trained pipeline. At the address of a store, a
    folder of this machine that is copied there (docs/data.md)."""
    overwrite_output_dir: bool = _run(False)
    """Start anew: checkpoints and metrics in the output folder are removed, other files stay. Once: a job that its
    scheduler puts back into the queue goes on."""
    resume_from_checkpoint: str | None = _run(None, kind="path")
    "Checkpoint folder to go on from (default, and latest: the newest sound one in the output folder)."
    accept_changes: list[str] = _run(())
    """Settings in which this run may differ from the checkpoint it resumes, as learning_rate; any other difference is
    refused."""
    do_train: bool = _run(False, "Train; the Trainer script does nothing without it.")
    seed: Annotated[int, Bounds(least=0, most=MAX_SEED)] = _run(42, loop_default=23, part_of=True)
    "Decides initial weights, order, crops, timesteps and noise: the same seed, the same run."
    per_device_train_batch_size: Samples = _batch(8, also=("train_batch_size",), loop_default=6)
    "Samples that a device takes at a time."
    gradient_accumulation_steps: Annotated[int, ABOVE_0, "batches"] = _batch(1, loop_default=10, needs=_NO_TOTAL)
    "Batches a device takes for one update, whose gradients are averaged."
    global_batch_size: Samples | None = _batch(None)
    "Samples of an update over all devices, from which --gradient_accumulation_steps is worked out."
    max_steps: Annotated[int, Bounds(most=_MOST), "updates"] = _length(-1, also=("max_train_steps",))
    "Optimizer updates, exactly so many; 0 or less: --num_train_epochs says."
    max_samples: Annotated[int, Bounds(above=0, most=_MOST), "samples"] | None = _length(
        None, "Budget in samples in place of --max_steps, rounded up to whole updates.", also=("num_examples_to_see",)
    )
    num_train_epochs: Annotated[float, Bounds(above=0, most=10**9), "epochs"] = _length(
        1.0, loop_default=100.0, needs=_NO_LENGTH
    )
    "Passes over the rows, where neither --max_steps nor --max_samples is given."
    max_skipped_updates: Updates = _run(3)
    """Stop after this many updates one after another whose loss or gradient is not finite; fewer are skipped. 1 stops
    at the first."""
    save_steps: Updates = _run(500, loop_default=5000, also=("checkpointing_steps",))
    "Updates between two checkpoints; one more follows the last update."
    save_at: list[UpdatesOr0] = _run(())
    "Save after these updates too, each once; 0: before the first."
    save_total_limit: Annotated[int, FROM_0, "checkpoints"] | None = _run(None, also=("checkpoints_total_limit",))
    "Keep so many of the newest checkpoints (default: all)."
    backup_every: UpdatesOr0 = _run(0)
    "Save after every so many updates too, and never remove those checkpoints; 0: none."

    use_async_save: bool = _run(False)
    "Write checkpoints beside the training, which waits only for a copy in host memory (docs/training.md)."

    push_to_hub: bool = _run(False)
    "Send the trained model, with its card, to the Hugging Face hub when the run has ended."
    hub_model_id: str | None = _run(None, needs=_HUB)
    "OWNER/NAME there, for you alone where it is new (default: your account's, called as the output folder)."
    hub_token: str | None = _run(None, needs=_HUB, secret="HF_TOKEN")
    "Token that may write there; kept in no file of the run (default: HF_TOKEN, or that of huggingface-cli login)."

    learning_rate: Positive = _optimizer(5e-5, "Learning rate of all that is trained, after the warm-up.", also=("lr",))
    scale_lr: bool = _optimizer(False)
    "Multiply the learning rates by the samples of an update over --lr_batch_size (linear scaling)."
    lr_batch_size: Samples = _optimizer(1, "With --scale_lr: the batch size that the learning rates are meant for.")
    lr_scheduler_type: str = _optimizer("constant", choices=LR_SCHEDULES, also=("lr_scheduler",))
    "Learning rate schedule, in updates."
    warmup_steps: UpdatesOr0 = _optimizer(0, also=("lr_warmup_steps",))
    "Updates over which the learning rate rises from 0."
    warmup_ratio: Share = _optimizer(0.0, needs=_NO_WARMUP)
    "The same as a share of all updates, where --warmup_steps is 0."
    num_cycles: Positive = _optimizer(0.5, also=("lr_num_cycles",), needs=_COSINE)
    "cosine: waves, of which a half falls to 0 once; cosine_with_restarts: falls, at least 1."
    lr_end: NotNegative = _optimizer(1e-7, "polynomial: learning rate of the last update.", needs=_POLYNOMIAL)
    min_lr: NotNegative = _optimizer(0.0, "cosine: the rate it falls to.", needs=_ONE_COSINE)
    lr_steps: str | None = _optimizer(None, needs=_PIECEWISE)
    """piecewise_constant: factors on the rate, each with the update it ends before, and the last one, as
    1:1000,0.1:5000,0.01 (all of it for 1,000 updates, a tenth up to update 5,000, then a hundredth)."""
    power: Positive = _optimizer(1.0, also=("lr_power",), needs=_POLYNOMIAL)
    "polynomial: exponent; 1 is a straight line."
    weight_decay: NotNegative = _optimizer(0.0, also=("adam_weight_decay",), loop_default=1e-2)
    "Weight decay of AdamW, as a share of the learning rate."
    decay_norms_and_biases: bool = _optimizer(True)
    "Weight decay on every parameter, as published; false leaves out norms and biases."
    optimizer: str = _optimizer("adamw", choices=OPTIMIZERS, shorthand={"use_8bit_adam": "adamw8bit"})
    """What updates the weights; adamw8bit: AdamW with moments in 8 bits; muon: Muon those of convolutions and linear
    layers inside the networks, AdamW all others, with the same rate and decay (docs/training.md)."""
    muon_momentum: SmallShare = _optimizer(0.95, "Decay of Muon's mean of gradients.", needs=_MUON)
    muon_nesterov: bool = _optimizer(True, "Nesterov's momentum, as published.", needs=_MUON)
    adam_beta1: SmallShare = _optimizer(0.9, "Decay of AdamW's mean of gradients.")
    adam_beta2: SmallShare = _optimizer(0.999, "Decay of AdamW's mean of squared gradients.")
    adam_epsilon: NotNegative = _optimizer(1e-8, "Added to the root of AdamW's mean of squares.")
    max_grad_norm: float = _optimizer(-1.0, "Clip the gradient's global norm to this; 0 or less: no clipping.")

    device: str = _compute(DEFAULT_DEVICE, f"What to compute on: {DEVICE_HELP}.", kind="device")
    dataloader_num_workers: Annotated[int, FROM_0, "processes"] = _compute(0, also=("num_workers",), loop_default=6)
    "Processes that read and decode for each device; 0: the training process itself does."
    recompute: bool = _compute(False, also=("gradient_checkpointing",))
    "Keep fewer activations; compute them again going back: less memory, more time."
    bf16: bool = _half(False, "Compute in bfloat16 what gains from it, where the device can (GPUs from Ampere on).")
    fp16: bool = _half(False, "The same in float16, with the loss scaled.")
    fp16_opt_level: str = _half("O1", choices=("O1", "O2"), needs=_MIXED)
    "With --bf16 or --fp16: O1 keeps float32 weights, O2 half-precision ones and float32 masters."
    scale_loss: Positive = _compute(32768.0, needs=Needs("--fp16", lambda given: given.fp16))
    "With --fp16: factor on the loss to begin with; halved when a gradient overflows."
    amp_custom_white_list: list[str] | None = _compute(None, needs=_MIXED)
    "With --bf16 or --fp16: further operations of Paddle to compute in half precision."
    amp_custom_black_list: list[str] | None = _compute(None, needs=_MIXED)
    "With --bf16 or --fp16: further operations of Paddle to compute in float32."
    tf32: bool = _compute(False, also=("allow_tf32",))
    "GPUs: multiply float32 matrices with 10 bits of mantissa in place of 23, which is faster."
    cudnn_search: bool = _compute(False)
    "GPUs: try cuDNN's algorithms for each new shape and take the fastest; bits may differ."
    fused_adamw: bool = _compute(False)
    "Update all weights in a few kernel launches: the same formula, faster on GPUs."
    to_static: bool = _compute(False)
    """Compile text encoder and UNet at every start, which takes seconds; then GPUs do not wait for Python at each
    operation."""
    sharding: str = _compute("")
    """stage1: each rank keeps the optimizer's state of its share of the parameters only, with the same results to the
    bit; stage2: and the gradients of its share only, once it has gone back; stage3: and the parameters and averages of
    its share only, but for the layer that is computed."""
    check_ranks_every: UpdatesOr0 = _compute(500)
    "Updates between two comparisons of all ranks' parameters, which stop the run where they differ; 0: none."
    gc_steps: UpdatesOr0 = _compute(0)
    """Collect Python's cyclic garbage after every so many updates, on all ranks at once, and at no other time, when one
    rank would keep the others waiting; 0: whenever Python does."""
    data_timeout: Seconds = _compute(600.0)
    "Seconds that a rank may wait for a batch before the run ends with an error; 0: for ever."
    rank_timeout: Seconds = _compute(1800.0)
    """Seconds that a rank may wait for the others, as while one saves, before the run ends with an error that names who
    is late; 0: for ever."""
    ddp_find_unused_parameters: bool | None = _compute(None, scripts=("trainer",))
    "Several ranks: look for parameters without a gradient at each update (slower)."
    release_grads: bool = _compute(False, "Free the gradients' memory after each update.", scripts=("trainer",))
    skip_memory_metrics: bool = _compute(True, scripts=("trainer",))
    "PaddleNLP's own report on memory stays off; peak memory is in the metrics anyway."
    skip_profile_timer: bool = _compute(True, "PaddleNLP's own timers stay off.", scripts=("trainer",))

    logging_steps: Updates = _logging(500, "Updates between two lines of the metrics.", loop_default=50)
    logging_dir: str | None = _logging(None, kind="path")
    "Folder of VisualDL's and TensorBoard's files (default: logs in the output folder)."
    report_to: list[str] = _logging(("visualdl",), choices=REPORTERS, also=("writer_type",))
    "Where curves and pictures go besides metrics.jsonl; all: to each whose package is installed."
    disable_tqdm: bool = _logging(False, "Show no progress bar.")
    benchmark: bool = _logging(False, "Log avg_reader_cost, avg_batch_cost and ips beside the other numbers.")
    profiler_options: str | None = _logging(None)
    """Profile these updates and go on: "batch_range=[10,20];timer_only=False;profile_path=FOLDER", for
    chrome://tracing."""

    validation_prompts: list[str] | None = _validation(None, needs=_PICTURES)
    """Prompts, or text files of them, one a line, drawn every --image_logging_steps updates (default: captions of the
    current batch)."""
    validation_guidance_scales: list[float] | None = _validation(None, needs=_PICTURES)
    "Guidance scales of these pictures; 1 is none (default: 1 and the model's own)."
    validation_steps: Annotated[int, "updates"] = _validation(1000, needs=VALIDATION)
    "Updates between two losses of --validation_file_list; 0 or less: never."

    # The expressions of settings that came from the environment, by key: what may be saved of them.
    written: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    # The store's address that was given as `output_dir`, which then is the folder that is copied there.
    output_store: str | None = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        if is_address(self.output_dir):
            self.output_store = check_address(self.output_dir).rstrip("/")
            self.output_dir = str(cache_dir().joinpath("outputs", *self.output_store.replace("://", "/").split("/")))
        if "all" in self.report_to:
            self.report_to = [name for name, package in PACKAGES.items() if find_spec(package)]
        for name in ("output_dir", "logging_dir"):
            if value := getattr(self, name):
                setattr(self, name, os.path.expanduser(local_path(value) if "://" in value else value))

    @property
    def log_folder(self) -> Path:
        """Where VisualDL's and TensorBoard's files go: `logging_dir`, which is relative to the output folder."""
        return Path(self.output_dir, self.logging_dir or "logs")

    def accumulation_for(self, num_ranks: int) -> int:
        """The batches of one update: what --global_batch_size makes of it on so many ranks. Raises ConfigError."""
        wanted, at_once = self.global_batch_size, num_ranks * self.per_device_train_batch_size
        if wanted is None:
            return self.gradient_accumulation_steps
        if wanted % at_once:
            near = " or ".join(str(size) for size in (wanted - wanted % at_once, wanted + -wanted % at_once) if size)
            flag, size = "--per_device_train_batch_size", self.per_device_train_batch_size
            raise ConfigError(
                f"--global_batch_size {wanted} is not a multiple of {at_once}, which {count_of(num_ranks, 'device')} "
                f"with {flag} {size} take at a time; give {near}, or another {flag}"
            )
        return wanted // at_once

    def samples_of_update(self, num_ranks: int) -> int:
        """The global batch size on so many ranks. Raises ConfigError."""
        return num_ranks * self.per_device_train_batch_size * self.accumulation_for(num_ranks)

    def check(self) -> None:
        """Raises ConfigError for values that do not go together."""
        if self.lr_batch_size != 1 and not self.scale_lr:
            raise ConfigError("--lr_batch_size does nothing without --scale_lr; add it or omit both")
        if self.fp16 and self.bf16:
            raise ConfigError("--fp16 and --bf16 do not go together; omit one of them")
        if self.to_static and self.recompute:
            raise ConfigError(
                "--to_static with --recompute: a compiled model keeps its activations, so that nothing is recomputed; "
                "omit one of them"
            )
        if self.profiler_options:
            _check_profiler_options(self.profiler_options)
        if self.lr_scheduler_type == "piecewise_constant":
            read_lr_steps(self.lr_steps)
        self._check_sharding()
        cores = count_usable_cores()
        if self.dataloader_num_workers > (most := max(_MOST_WORKERS, _MOST_WORKERS_A_CORE * cores)):
            raise ConfigError(
                f"--dataloader_num_workers {self.dataloader_num_workers}: this machine has {count_of(cores, 'core')}; "
                f"give as many, and at most {most}"
            )

    def _check_sharding(self) -> None:
        """Raises ConfigError for all but no sharding and the stages that are built, and for what two cannot yet."""
        if "offload" in self.sharding.split():
            raise ConfigError(f"--sharding {self.sharding} is not supported: shares stay on devices; use stage3")
        if self.sharding not in ("", *SHARDING_STAGES):
            raise ConfigError(f"--sharding {self.sharding} is not known; use {', '.join(SHARDING_STAGES)}, or omit it")
        halves = self.fp16 or (self.bf16 and self.fp16_opt_level == "O2")
        if self.sharding in ("stage2", "stage3") and (halves or self.to_static):
            what = "gradients in half precision" if halves else "--to_static"
            raise ConfigError(f"--sharding {self.sharding} was never run with {what}; use --sharding stage1")


def read_lr_steps(text: str | None) -> tuple[tuple[float, float], ...]:
    """(update before which it holds, factor on the rate) of each of `--lr_steps`, in order; the last holds to the end.
    Raises ConfigError."""
    *rules, last = (text or "").split(",")
    try:
        pairs = [rule.split(":") for rule in rules]
        found = (*sorted((int(update), float(factor)) for factor, update in pairs), (math.inf, float(last)))
        if all(0 <= factor < math.inf for _, factor in found) and len(dict(found)) == len(found):
            return found
    except ValueError:
        pass
    raise ConfigError(
        f"--lr_scheduler_type piecewise_constant with --lr_steps {text}: write factors of 0 or more, each but the last "
        "with an update of its own, as 1:1000,0.1:5000,0.01"
    )


def _check_profiler_options(text: str) -> None:
    """Raises ConfigError for what PaddleNLP's profiler does not take, or what would end the run."""
    from paddlenlp.utils.profiler import ProfilerOptions  # which imports paddle

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
