"""Checkpoints that were written before they held model.json: what they are made of is found by their run's flags.

run.json beside them has the flags, which may name files that are not here, or that are others here: a path is relative
to the folder that the run was started in. So what cannot be found is an error that says how to name it, and a VAE that
is found must have the very weights that the checkpoint has.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...config.network_files import find_network_file
from ...families.base import get_family
from ...utils.errors import ConfigError, ModelError
from ...utils.files import read_json_object
from ..components import ComponentWeights, Weights
from ..configs import complete_config, read_config
from ..fetch import locate_model
from ..folders import COMPONENT_FOLDERS, NOT_TEXT_TO_IMAGE, find_component, is_checkpoint, is_tokenizer
from ..model_file import LDM
from ..noise_schedule import PUBLISHED_SCHEDULE, read_scheduler
from ..runs import RUN_FILE

_PIPELINE = "pipeline"  # what a run exports at its end, beside its checkpoints


def read_older_checkpoint(
    path: Path, arrays: dict[str, dict], config_file, read_weights: Callable, read_component: Callable
) -> Weights:
    """The components of a checkpoint with the `arrays` of each. `config_file`: config.json of its VAE, None where not
    known. `read_weights` and `read_component`, those of `read`, read what its flags name. Raises ModelError."""
    arguments = _run_arguments(path)
    weights = Weights(scheduler=PUBLISHED_SCHEDULE | _start_schedule(arguments, path, read_weights))
    for name in ("prediction_type", "rescale_betas_zero_snr"):
        weights.scheduler[name] = getattr(arguments, name)
    for kind, own in arrays.items():
        if kind == "vae" and config_file:
            config = complete_config(kind, read_json_object(config_file, ModelError), config_file)
        else:
            config = _run_config(kind, arguments, path, own, read_component)
        if kind == "text_encoder" and "model.embed_tokens.weight" in own:
            # The tokenizer's sizes replaced the config's.
            config["vocab_size"] = len(own["model.embed_tokens.weight"])
            config["max_position_embeddings"] = len(own["model.embed_positions.weight"])
        weights.components[kind] = ComponentWeights(config, own, str(path))
    weights.tokenizer = find_older_tokenizer(path)
    weights.metadata = {"model_max_length": arguments.model_max_length}
    if arguments.freeze_text_encoder or arguments.pretrained_text_encoder_name:
        weights.frozen = ("vae", "text_encoder")
    return weights


def find_older_tokenizer(path: Path) -> Path | None:
    """The tokenizer folder of a checkpoint's run, if it is found."""
    arguments = _run_arguments(path)
    for folder in (
        path.parent / _PIPELINE / "tokenizer",
        Path(arguments.tokenizer_name or "").expanduser(),
        Path(arguments.model_name_or_path or "").expanduser() / "tokenizer",
    ):
        if is_tokenizer(folder):
            return folder
    return None


def _run_arguments(checkpoint: Path):
    """The flags with which the run of a checkpoint built its model. Raises ModelError."""
    run = read_json_object(checkpoint.parent / RUN_FILE, ModelError, inside=True)
    if "ModelArguments" not in run:
        raise ModelError(NOT_TEXT_TO_IMAGE.format(checkpoint))
    settings = get_family(LDM).Config
    known = settings.__dataclass_fields__
    return settings(**{key: value for key, value in run["ModelArguments"].items() if key in known})


def _run_config(kind: str, arguments, checkpoint: Path, arrays: dict, read_component: Callable) -> dict:
    """The config with which a run built a component: that of the pipeline it exported, else what its flags name."""
    exported = find_component(checkpoint.parent / _PIPELINE, kind)
    if exported:
        return read_config(kind, exported)
    if arguments.starts_from_pipeline:
        start = _find(arguments.model_name_or_path, kind, checkpoint)
        if start.is_dir() and not is_checkpoint(start) and (folder := find_component(start, kind)):
            return read_config(kind, folder)
        return read_component(kind, start, arguments.original_config_file).config
    names = arguments.component_names()
    if names[kind]:
        found = _find(names[kind], kind, checkpoint)
        component = read_component(kind, found, arguments.original_config_file)
        if kind == "vae" and not _have_equal_arrays(component.arrays, arrays):
            raise ModelError(f"{found} is not the VAE that {checkpoint} was trained with; {_REMEDY}")
        return component.config
    file = arguments.config_files()[kind]
    try:
        path = find_network_file(file)
    except ConfigError as error:
        raise _not_found(checkpoint, kind, file) from error
    return complete_config(kind, read_json_object(path, ModelError), file)


_REMEDY = (
    "checkpoints of this age do not hold their configs: name the config.json of its VAE with --original_config_file"
)


def _find(name: str, kind: str, checkpoint: Path) -> Path:
    """The folder or file of a run's flag, here or in the cache of names. Raises ModelError."""
    try:
        return locate_model(name, {kind: COMPONENT_FOLDERS[kind]}, offline=True)
    except ModelError as error:
        raise _not_found(checkpoint, kind, name) from error


def _not_found(checkpoint: Path, kind: str, name) -> ModelError:
    remedy = _REMEDY if kind == "vae" else "go to the folder that the run was started in, or copy it there"
    return ModelError(f"{checkpoint} was trained with the {kind} {name}, which is not found here; {remedy}")


def _have_equal_arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def _start_schedule(arguments, checkpoint: Path, read_weights: Callable) -> dict:
    """The scheduler's settings of the pipeline that a run started from; nothing for a run from configs."""
    if not arguments.starts_from_pipeline:
        return {}
    exported = checkpoint.parent / _PIPELINE / "scheduler" / "scheduler_config.json"
    if exported.is_file():
        return read_scheduler(exported)
    start = _find(arguments.model_name_or_path, "vae", checkpoint)
    return read_weights(start, ("vae",), arguments.original_config_file).scheduler
