"""What decides which samples a step sees and what it makes of them: a checkpoint of another identity is refused."""

import dataclasses
import json

from .. import __version__
from ..config.arguments import DataArguments
from ..data.dataset import TextImageDataset
from .arguments import LDMTrainingArguments
from .optimizer.precision import precision_name
from .rows import read_where

# Settings that every sample, or every update, depends on.
_DATA_SETTINGS = (
    *("resolution", "crop_fraction", "random_crop", "random_flip", "interpolation"),
    *("max_skipped", "max_skipped_share"),
)
_OPTIMIZER_SETTINGS = (
    *("learning_rate", "unet_learning_rate", "text_encoder_learning_rate", "scale_lr", "lr_batch_size"),
    *("lr_scheduler_type", "warmup_steps", "warmup_ratio", "num_cycles", "lr_end", "power"),
    *("weight_decay", "decay_norms_and_biases", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
)


def run_identity(
    arguments: LDMTrainingArguments,
    data_arguments: DataArguments,
    dataset: TextImageDataset,
    global_batch_size: int,
    max_steps: int,
) -> dict:
    """What decides which samples a step sees and what it makes of them, by name, JSON-ready.

    A checkpoint of another run differs in it. What speed and memory alone depend on is no part of it.
    """
    where = read_where(data_arguments)
    constant = arguments.lr_scheduler_type in ("constant", "constant_with_warmup")
    return {
        "seed": arguments.seed,
        "where": None if where is None else str(where),
        "data": dataset.fingerprint.digest,
        "rows": len(dataset),
        "weights": dataset.weights,
        "global_batch_size": global_batch_size,
        "max_steps": None if constant else max_steps,
        "precision": precision_name(arguments),
        **{name: getattr(data_arguments, name) for name in _DATA_SETTINGS},
        **{name: getattr(arguments, name) for name in _OPTIMIZER_SETTINGS},
    }


def resolved_config(*groups) -> dict:
    """All settings by group, JSON-ready, for run.json."""
    return {
        "ppldm": __version__,
        **{type(group).__name__: _plain(dataclasses.asdict(group)) for group in groups},
    }


def _plain(settings: dict) -> dict:
    return json.loads(json.dumps(settings, default=str))
