"""What decides which samples a step sees and what it makes of them: a checkpoint of another identity is refused."""

from .. import __version__
from ..config.captions import caption_identity
from ..config.data import DataOptions
from ..config.option import identity_of, options
from ..config.recipe import sections_of
from ..config.training import TrainingOptions
from ..data.dataset import TextImageDataset
from ..utils.checksums import digest_of
from .optimizer.precision import precision_name
from .rows import read_where


def run_identity(
    arguments: TrainingOptions,
    data_arguments: DataOptions,
    dataset: TextImageDataset,
    group_size: int,
    global_batch_size: int,
    max_steps: int,
) -> dict:
    """What decides which samples a step sees and what it makes of them, by name, JSON-ready.

    A checkpoint of another run differs in it. What only speed and memory depend on is not part of it.
    """
    where, buckets = read_where(data_arguments), dataset.buckets
    constant = arguments.lr_scheduler_type in ("constant", "constant_with_warmup")
    return {
        "seed": arguments.seed,
        "where": None if where is None else str(where),
        "data": dataset.fingerprint.digest,
        "rows": len(dataset),
        "weights": dataset.weights,
        "buckets": buckets and [f"{width}x{height}" for height, width in buckets.shapes],
        "bucket_group_size": buckets and group_size,
        "global_batch_size": global_batch_size,
        "max_steps": None if constant else max_steps,
        "precision": precision_name(arguments),
        "latents": dataset.latents and data_arguments.latents_dtype,
        "text_embeddings": dataset.embeddings and data_arguments.text_embeddings_dtype,
        **(caption_identity(data_arguments) if dataset.tokenizer else {}),
        **identity_of(data_arguments, arguments),
    }


def without_secrets(identity: dict, written: dict[str, str], *groups) -> dict:
    """An identity of settings of `groups` in which a digest tells texts that came from the environment, whose
    expressions are `written`."""
    found = dict(identity)
    for name, stated in ((name, stated) for group in groups for name, stated in options(type(group)).items()):
        if stated.key in written and isinstance(found.get(name), str) and not stated.choices:
            found[name] = f"{written[stated.key]} (digest {digest_of(found[name])[:8]})"
    return found


def resolved_config(config, data: DataOptions, arguments: TrainingOptions) -> dict:
    """All settings by section, JSON-ready, for run.json; of what came from the environment the expression."""
    found = {"ppldm": __version__, "family": config.family, **sections_of(config, data, arguments)}
    for key, expression in arguments.written.items():
        section, _, name = key.rpartition(".")
        (found[section] if section else found)[name] = expression
    return found
