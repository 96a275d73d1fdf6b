"""The command line of both training scripts: one parser, both published spellings.

PaddleNLP's TrainingArguments supplies the flags of its Trainer; the hand-written loop takes the same ones, under the
published names of its own script too, and refuses those that it does not implement.
"""

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import List, Optional  # noqa: UP035 (PaddleNLP's parser reads List)

from paddlenlp.trainer import PdArgumentParser, TrainingArguments
from paddlenlp.trainer.argparser import strtobool

from ..config.arguments import DataArguments, ModelArguments
from ..config.flags import PLACEHOLDERS, format_default, parse_known_or_suggest
from ..utils.cpu import quiet_paddle
from ..utils.device import use_device
from ..utils.errors import ConfigError
from ..utils.files import local_path
from ..utils.log import get_logger
from .argument_checks import check_ranges, check_training, warn_of_workers
from .flag_help import HELP
from .monitor.sinks import check_reporters
from .optimizer.optim import LR_SCHEDULES

# Spelling of the published no-trainer script -> spelling of the Trainer.
ALIASES = {
    "pretrained_model_name_or_path": "model_name_or_path",
    "train_batch_size": "per_device_train_batch_size",
    "num_workers": "dataloader_num_workers",
    "max_train_steps": "max_steps",
    "lr_scheduler": "lr_scheduler_type",
    "lr_warmup_steps": "warmup_steps",
    "adam_weight_decay": "weight_decay",
    "writer_type": "report_to",
    "num_examples_to_see": "max_samples",
}

# Defaults of the published no-trainer script where they differ from the Trainer's.
LOOP_DEFAULTS = {
    "output_dir": "./output-model",
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 10,
    "dataloader_num_workers": 6,
    "num_train_epochs": 100,
    "max_steps": 100000000000,
    "weight_decay": 1e-2,
    "save_steps": 5000,
    "logging_steps": 50,
    "seed": 23,
}

# The Trainer's flags that the hand-written loop implements; any other one is refused there.
LOOP_FLAGS = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "do_train", "device", "seed"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *("max_samples", "max_skipped_updates", "accept_changes"),
    *("learning_rate", "unet_learning_rate", "text_encoder_learning_rate", "scale_lr", "lr_batch_size"),
    *("lr_scheduler_type", "warmup_steps", "warmup_ratio", "num_cycles", "lr_end", "power"),
    *("weight_decay", "decay_norms_and_biases", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("logging_dir", "logging_steps", "save_steps", "save_total_limit", "backup_every", "report_to", "disable_tqdm"),
    *("dataloader_num_workers", "recompute", "benchmark", "profiler_options"),
    *("bf16", "fp16", "fp16_opt_level", "scale_loss", "amp_custom_white_list", "amp_custom_black_list"),
    *("validation_prompts", "validation_guidance_scales", "validation_steps"),
    *("check_ranks_every", "data_timeout", "rank_timeout"),
    *("tf32", "cudnn_search", "fused_adamw", "to_static", "sharding"),
}

# Those that its Trainer alone has, and that mean something here.
TRAINER_FLAGS = {"ddp_find_unused_parameters", "release_grads", "skip_memory_metrics", "skip_profile_timer"}

# What neither script does yet: the shared checkpoint would not hold the whole state.
REFUSED_FLAGS = (
    *("unified_checkpoint", "amp_master_grad"),
    *("load_best_model_at_end", "do_eval", "do_predict"),
)

# What was seen to stand against a flag, on PaddleNLP 3.0.0b4 and Paddle 3.3.1.
_WHY_NOT = {
    "unified_checkpoint": "works for PaddleNLP's own model classes only; checkpoints here hold the whole model for any "
    "number of ranks as they are",
}

# Endings of flags that name a file or a folder.
_PATHS = ("_dir", "_path", "file_list", "_file", "_checkpoint")

# Flags that do nothing by themselves: the flag, what it needs, and whether that is there.
_NEEDS = (
    *((name, "--bf16 or --fp16", lambda given: given.bf16 or given.fp16)
      for name in ("fp16_opt_level", "amp_custom_white_list", "amp_custom_black_list")),
    ("scale_loss", "--fp16", lambda given: given.fp16),
    ("num_cycles", "--lr_scheduler_type cosine or cosine_with_restarts",
     lambda given: given.lr_scheduler_type.startswith("cosine")),
    *((name, "--lr_scheduler_type polynomial", lambda given: given.lr_scheduler_type == "polynomial")
      for name in ("lr_end", "power")),
    ("ema_decay", "--use_ema alone: --ema_start_iters, --ema_iters and --ema_beta have a decay of their own",
     lambda given: given.use_ema and given.ema_start_iters is given.ema_iters is given.ema_beta is None),
    ("text_encoder_learning_rate", "a text encoder that is trained: those of --freeze_text_encoder and "
     "--pretrained_text_encoder_name are not",
     lambda given: not (getattr(given, "freeze_text_encoder", False)
                        or getattr(given, "pretrained_text_encoder_name", None))),
    *((name, "--image_logging_steps above 0", lambda given: given.image_logging_steps > 0)
      for name in ("validation_prompts", "validation_guidance_scales")),
    *((name, "--validation_file_list", lambda given: given.validation_file_list is not None)
      for name in ("validation_rows", "validation_steps")),
)  # fmt: skip


@dataclass
class LDMTrainingArguments(TrainingArguments):
    """PaddleNLP's TrainingArguments with the defaults of the published recipe, and a few flags more."""

    _argument_group_name = "training"

    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Start anew: checkpoints and metrics in the output folder are removed, other files stay. Once: a "
            "job that its scheduler puts back into the queue goes on."
        },
    )
    resume_from_checkpoint: Optional[str] = field(
        default=None,
        metadata={
            "help": "Checkpoint folder to go on from (default, and latest: the newest sound one in the output folder)."
        },
    )
    backup_every: int = field(
        default=0,
        metadata={"help": "Save after every so many updates too, and never remove those checkpoints; 0: none."},
    )
    check_ranks_every: int = field(
        default=500,
        metadata={
            "help": "Updates between two comparisons of all ranks' parameters, which stop the run where they differ; "
            "0: none."
        },  # fmt: skip
    )
    data_timeout: float = field(
        default=600.0,
        metadata={"help": "Seconds that a rank may wait for a batch before the run ends with an error; 0: for ever."},
    )
    rank_timeout: float = field(
        default=1800.0,
        metadata={
            "help": "Seconds that a rank may wait for the others, as while one saves, before the run ends with an "
            "error that names who is late; 0: for ever."
        },
    )
    accept_changes: List[str] = field(  # noqa: UP006
        default_factory=list,
        metadata={
            "help": "Settings in which this run may differ from the checkpoint it resumes, as learning_rate; "
            "any other difference is refused."
        },
    )
    lr_scheduler_type: str = field(
        default="constant", metadata={"help": "Learning rate schedule, in updates.", "choices": list(LR_SCHEDULES)}
    )
    max_grad_norm: float = field(
        default=-1.0, metadata={"help": "Clip the gradient's global norm to this; 0 or less: no clipping."}
    )
    report_to: Optional[List[str]] = field(  # noqa: UP006
        default_factory=lambda: ["visualdl"],
        metadata={"help": "Where curves and pictures go besides metrics.jsonl: visualdl, tensorboard, wandb, or none."},
    )
    logging_dir: Optional[str] = field(
        default=None,
        metadata={"help": "Folder of VisualDL's and TensorBoard's files (default: logs in the output folder)."},
    )
    max_samples: Optional[int] = field(
        default=None,
        metadata={"help": "Budget in samples in place of --max_steps, rounded up to whole updates."},
    )
    max_skipped_updates: int = field(
        default=3,
        metadata={
            "help": "Stop after this many updates one after another whose loss or gradient is not finite; fewer are "
            "skipped. 1 stops at the first."
        },
    )
    scale_lr: bool = field(
        default=False,
        metadata={
            "help": "Multiply the learning rates by the samples of an update over --lr_batch_size (linear scaling)."
        },
    )
    lr_batch_size: int = field(
        default=1, metadata={"help": "With --scale_lr: the batch size that the learning rates are meant for."}
    )
    unet_learning_rate: Optional[float] = field(
        default=None, metadata={"help": "Learning rate of the UNet (default: --learning_rate)."}
    )
    text_encoder_learning_rate: Optional[float] = field(
        default=None, metadata={"help": "Learning rate of the text encoder (default: --learning_rate)."}
    )
    decay_norms_and_biases: bool = field(
        default=True,
        metadata={"help": "Weight decay on every parameter, as published; false leaves out norms and biases."},
    )
    validation_prompts: Optional[List[str]] = field(  # noqa: UP006
        default=None,
        metadata={
            "help": "Prompts, or text files of them, one a line, drawn every --image_logging_steps updates "
            "(default: captions of the current batch)."
        },  # fmt: skip
    )
    validation_guidance_scales: List[float] = field(  # noqa: UP006
        default_factory=lambda: [1.0, 7.5], metadata={"help": "Guidance scales of these pictures; 1 is none."}
    )
    validation_steps: int = field(
        default=1000,
        metadata={"help": "Updates between two losses of --validation_file_list; 0 or less: never."},
    )
    tf32: bool = field(
        default=False,
        metadata={"help": "GPUs: multiply float32 matrices with 10 bits of mantissa in place of 23, which is faster."},
    )
    cudnn_search: bool = field(
        default=False,
        metadata={"help": "GPUs: try cuDNN's algorithms for each new shape and take the fastest; bits may differ."},
    )
    fused_adamw: bool = field(
        default=False,
        metadata={"help": "Update all weights in a few kernel launches: the same formula, faster on GPUs."},
    )
    to_static: bool = field(
        default=False,
        metadata={
            "help": "Compile text encoder and UNet at every start, which takes seconds; then GPUs do not wait for "
            "Python at each operation."
        },
    )
    sharding: str = field(
        default="",
        metadata={
            "help": "stage1: each rank keeps the optimizer's state of its share of the parameters only, with the same "
            "results to the bit; stage2: and the gradients of its share only, once it has gone back."
        },
    )
    benchmark: bool = field(
        default=False, metadata={"help": "Log avg_reader_cost, avg_batch_cost and ips beside the other numbers."}
    )
    profiler_options: Optional[str] = field(
        default=None,
        metadata={
            "help": "Profile these updates and go on: "
            '"batch_range=[10,20];timer_only=False;profile_path=FOLDER", for chrome://tracing.'
        },
    )

    def __post_init__(self):
        check_ranges(self)  # the base class says some of it worse
        # The base class knows fewer schedules than ours; the learning rate is set by training.optim in any case.
        schedule, self.lr_scheduler_type = self.lr_scheduler_type, "constant"
        # Its reporting callbacks are not used: training.metrics writes for both scripts.
        reporters, self.report_to = self.report_to, []
        # With it, the base class refuses more than one rank; ours works on any number.
        to_static, self.to_static = self.to_static, False
        # It would start the communication groups of its own kind of sharding.
        sharding, self.sharding = self.sharding, ""
        if self.logging_dir is None:
            self.logging_dir = str(Path(self.output_dir, "logs"))
        if not 0 <= self.warmup_ratio <= 1:
            raise ConfigError(f"--warmup_ratio {self.warmup_ratio} must be from 0 to 1")
        if self.device != "gpu":  # the default: a GPU where there is one
            use_device(self.device)
        with quiet_paddle():  # it starts the ranks' communication
            super().__post_init__()
        self.lr_scheduler_type, self.to_static = schedule, to_static
        self.reporters = reporters
        self.sharding = sharding

    def check(self) -> None:
        """Raises ConfigError for values that cannot work."""
        for scale in self.validation_guidance_scales:
            if not math.isfinite(scale):
                raise ConfigError(f"--validation_guidance_scales {scale} must be a number")
        if self.lr_batch_size != 1 and not self.scale_lr:
            raise ConfigError("--lr_batch_size does nothing without --scale_lr; add it or omit both")
        if self.max_steps <= 0 and self.num_train_epochs <= 0 and self.max_samples is None:
            raise ConfigError("nothing to train: give --max_steps, --max_samples or --num_train_epochs above 0")
        check_training(self)
        check_reporters(self.reporters)


def make_parser(loop: bool, model_group=ModelArguments) -> PdArgumentParser:
    """The parser of the Trainer script, or of a hand-written loop's. `model_group` describes what is trained."""
    parser = PdArgumentParser(
        (model_group, DataArguments, LDMTrainingArguments),
        usage="%(prog)s --output_dir OUT --file_list LIST [flags]",
        description="Stopped at any moment, the same command goes on from the last checkpoint in OUT. "
        "A flag of type BOOL alone means true. Steps are optimizer updates.",
        epilog="On CPUs, threads and MKL's path are chosen before Paddle is loaded, and said in the log: what the "
        "environment sets already stays (OMP_NUM_THREADS, MKL_DEBUG_CPU_TYPE), and PPLDM_NO_CPU_TUNING=1 chooses "
        "nothing. PPLDM_DEBUG=1 shows tracebacks and the libraries' own logs.",
        formatter_class=_HelpFormatter,
    )
    actions = {action.dest: action for action in parser._actions}
    for alias, name in ALIASES.items():
        if name not in actions:
            continue
        action = actions[name]
        action.option_strings.append(f"--{alias}")
        parser._option_string_actions[f"--{alias}"] = action
    if loop:
        actions["output_dir"].required = False
        parser.set_defaults(**LOOP_DEFAULTS | model_group.loop_defaults)
    hidden = _training_flags() - _flags_of(loop)
    for action in parser._actions:
        action.help = HELP.get(action.dest, action.help)
        if action.dest in hidden:
            action.help = argparse.SUPPRESS
        elif action.nargs == "?":
            action.metavar = "BOOL"
        elif action.nargs != 0 and not action.choices:
            action.metavar = PLACEHOLDERS.get(action.type, _placeholder(action))
        elif action.choices and len(action.option_strings) > 1:  # argparse would list them behind each spelling
            action.metavar = "NAME"
            action.help += f" One of {', '.join(action.choices)}."
        elif action.option_strings[0].startswith("--no_"):
            action.help = f"The same as --{action.dest} false."
    return parser


def parse_arguments(argv: list, loop: bool, model_group=ModelArguments) -> tuple:
    """(`model_group`, DataArguments, LDMTrainingArguments) of a command line, checked. Raises ConfigError."""
    parser = make_parser(loop, model_group)
    namespace = parse_known_or_suggest(parser, argv)
    _refuse_unsupported(parser, namespace, loop)
    for name in ("output_dir", "logging_dir"):
        if "://" in (value := getattr(namespace, name) or ""):
            setattr(namespace, name, str(local_path(value)))
    if loop and namespace.logging_dir:
        # The published loop joins it to the output folder; an absolute path stays as it is.
        namespace.logging_dir = str(Path(namespace.output_dir, namespace.logging_dir))
    groups = []
    for group in parser.dataclass_types:
        names = [f.name for f in dataclasses.fields(group) if f.init]
        try:
            groups.append(group(**{name: getattr(namespace, name) for name in names}))
        except ValueError as error:
            raise ConfigError(f"these flags do not go together: {error}") from error
    for group in groups:
        group.check()
    _warn_of_idle_flags(parser, namespace)
    if not loop and not groups[2].do_train:
        raise ConfigError("nothing to do: add --do_train")
    return tuple(groups)


def _refuse_unsupported(parser: PdArgumentParser, namespace: argparse.Namespace, loop: bool) -> None:
    for name in sorted(_training_flags()):
        if getattr(namespace, name) == parser.get_default(name):
            continue
        if name in REFUSED_FLAGS:
            raise ConfigError(f"--{name} {_WHY_NOT.get(name, 'is not supported yet')}; omit it")
        if name not in _flags_of(loop):
            script = "the hand-written loop has no" if loop else "the Trainer script has no use for"
            raise ConfigError(f"{script} --{name}; omit it")


def _warn_of_idle_flags(parser: PdArgumentParser, namespace: argparse.Namespace) -> None:
    if namespace.dataloader_num_workers != parser.get_default("dataloader_num_workers"):
        warn_of_workers(namespace.dataloader_num_workers)
    for name, needed, is_there in _NEEDS:
        given = getattr(namespace, name, None)
        if given not in (None, parser.get_default(name)) and not is_there(namespace):
            get_logger().warning("--%s does nothing without %s", name, needed)


def _placeholder(action: argparse.Action) -> str:
    if action.type is strtobool:
        return "BOOL"
    return "PATH" if action.dest.endswith(_PATHS) else "TEXT"


class _HelpFormatter(argparse.HelpFormatter):
    """Shows the default of a flag that has one; most of PaddleNLP's have none."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=100)

    def _get_help_string(self, action):
        if action.required or action.nargs == 0:
            return action.help
        shown = str(action.default).lower() if isinstance(action.default, bool) else format_default(action.default)
        return f"{action.help} (default: {shown.replace('%', '%%')})" if shown else action.help


def _flags_of(loop: bool) -> set[str]:
    """The training flags that a script implements."""
    return LOOP_FLAGS if loop else LOOP_FLAGS | TRAINER_FLAGS


def _training_flags() -> set[str]:
    return {f.name for f in dataclasses.fields(LDMTrainingArguments) if f.init}
