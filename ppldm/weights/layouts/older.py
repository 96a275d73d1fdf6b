"""What earlier versions wrote: text encoders under other names, and checkpoints without a model.json. What such a one
is made of follows from its run's flags in run.json, whose files may not be here, or may be others: so what is not found
is an error that says how to name it, and a VAE must have the checkpoint's very weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...config.network_files import find_network_file
from ...families.base import get_family
from ...utils.errors import ConfigError, ModelError
from ...utils.files import read_json_object
from ..components import ComponentWeights, Weights
from ..configs import PUBLISHED_SCHEDULE, complete_config, read_config, read_scheduler
from ..folders import NOT_TEXT_TO_IMAGE, RUN_FILE, find_component, is_tokenizer
from ..formats.files import require_few_layers
from ..model_file import LDM
from ..names import Unmapped, rename

_PIPELINE = "pipeline"  # what a run exports at its end, beside its checkpoints


def read_older_checkpoint(path: Path, arrays: dict[str, dict], config_file, open_model: Callable) -> Weights:
    """The components with these `arrays`. open_model: of `source`, for what its flags name. Raises ModelError."""
    arguments = _run_arguments(path)
    begun, exported = {}, path.parent / _PIPELINE / "scheduler" / "scheduler_config.json"
    if arguments.starts_from_pipeline and exported.is_file():
        begun = read_scheduler(exported)
    elif arguments.starts_from_pipeline:
        begun = _open(arguments.model_name_or_path, "vae", path, arguments, open_model).read(("vae",)).scheduler
    weights = Weights(scheduler=PUBLISHED_SCHEDULE | begun)
    for name in ("prediction_type", "rescale_betas_zero_snr"):
        weights.scheduler[name] = getattr(arguments, name)
    for kind, own in arrays.items():
        if kind == "vae" and config_file:
            config = complete_config(kind, read_json_object(config_file, ModelError), config_file)
        else:
            config = _run_config(kind, arguments, path, own, open_model)
        set_text_sizes(kind, config, own)
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


def _run_config(kind: str, arguments, checkpoint: Path, arrays: dict, open_model: Callable) -> dict:
    """The config with which a run built a component: the exported pipeline's, or else the one that its flags name."""
    exported = find_component(checkpoint.parent / _PIPELINE, kind)
    if exported:
        return read_config(kind, exported)
    is_whole = arguments.starts_from_pipeline
    if name := arguments.model_name_or_path if is_whole else arguments.name_of(kind):
        found = _open(name, kind, checkpoint, arguments, open_model)
        if is_whole and (config := found.config(kind)):
            return config
        component = found.component(kind)
        theirs = component.arrays
        if (
            kind == "vae"
            and not is_whole
            and not (
                theirs.keys() == arrays.keys() and all(np.array_equal(theirs[name], arrays[name]) for name in arrays)
            )
        ):
            raise ModelError(f"{found.path} is not the VAE that {checkpoint} was trained with; {_REMEDY}")
        return component.config
    file = arguments.file_of(kind)
    try:
        path = find_network_file(file)
    except ConfigError as error:
        raise _not_found(checkpoint, kind, file) from error
    return complete_config(kind, read_json_object(path, ModelError), file)


_REMEDY = (
    "checkpoints of this age do not hold their configs: name the config.json of its VAE with --original_config_file"
)


def _open(name: str, kind: str, checkpoint: Path, arguments, open_model: Callable):
    """The model of a run's flag, here or in the cache of names. Raises ModelError."""
    try:
        return open_model(name, True, (kind,), config_file=arguments.original_config_file)
    except ModelError as error:
        raise _not_found(checkpoint, kind, name) from error


def _not_found(checkpoint: Path, kind: str, name) -> ModelError:
    remedy = _REMEDY if kind == "vae" else "go to the folder that the run was started in, or copy it there"
    return ModelError(f"{checkpoint} was trained with the {kind} {name}, which is not found here; {remedy}")


def set_text_sizes(kind: str, config: dict, arrays: dict) -> None:
    """Where a text encoder was built, the tokenizer's sizes replaced the config's."""
    if kind == "text_encoder" and "model.embed_tokens.weight" in arrays:
        config["vocab_size"] = len(arrays["model.embed_tokens.weight"])
        config["max_position_embeddings"] = len(arrays["model.embed_positions.weight"])


def modern_text_encoder(arrays: dict, config: dict, folder: Path) -> dict:
    """An LDMBert of the older layout under today's names. It had no `to_logits`, which nothing uses: zeros."""
    require_few_layers(config, len(arrays), folder)
    theirs = {theirs: ours for ours, theirs in old_text_encoder_names(config).items()}
    try:
        renamed = {rename(name, theirs): array for name, array in arrays.items()}
    except Unmapped as error:
        raise ModelError(f"{folder} holds {error}, which its config has no place for; copy both again") from error
    if arrays["embeddings.word_embeddings.weight"].ndim != 2:
        raise ModelError(f"{folder}: embeddings.word_embeddings.weight is not a table of words; copy it again")
    words, width = arrays["embeddings.word_embeddings.weight"].shape
    logits = {"weight": np.zeros((width, words), np.float32), "bias": np.zeros(words, np.float32)}
    return {**renamed, **{f"to_logits.{name}": array for name, array in logits.items()}}


def old_text_encoder_names(config: dict) -> dict[str, str]:
    """The prefixes of an LDMBertModel to those of ppdiffusers before 0.16, which the older training layout has."""
    pairs = {
        "model.embed_tokens": "embeddings.word_embeddings",
        "model.embed_positions": "embeddings.position_embeddings",
        "model.layer_norm": "final_layer_norm",
    }
    for layer in range(config["encoder_layers"]):
        ours, theirs = f"model.layers.{layer}", f"encoder.layers.{layer}"
        pairs |= {
            f"{ours}.self_attn_layer_norm": f"{theirs}.norm1",
            f"{ours}.self_attn": f"{theirs}.self_attn",
            f"{ours}.final_layer_norm": f"{theirs}.norm2",
            f"{ours}.fc1": f"{theirs}.linear1",
            f"{ours}.fc2": f"{theirs}.linear2",
        }
    return pairs
