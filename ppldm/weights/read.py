"""Any of the known forms of a latent diffusion model, from a folder or a file to `Weights`; no pickle is run.

    a pipeline folder     written by ppldm, ppdiffusers, diffusers, or the older training scripts
    a .ckpt file          CompVis', with its YAML file; also by the folder that `ppldm export --to compvis` wrote
    a single file         Stable Diffusion 1.x or 2.x, .safetensors or .ckpt, with or without a YAML file
    checkpoint-<step>/    of a ppldm run: its model.json and tokenizer/ say what it is; for older ones see `older`

What only some of these forms need is imported where one is read.
"""

from pathlib import Path

from ..diffusion.drawing import kept_of
from ..families.base import get_family
from ..networks.configs import LABELS, is_ldmbert
from ..utils.checksums import checksum_file
from ..utils.errors import ModelError
from ..utils.files import read_json_object
from .components import ComponentWeights, Weights
from .configs import PUBLISHED_SCHEDULE, check_schedule, read_config, read_scheduler
from .folders import (
    CHECKPOINT_AVERAGE,
    CHECKPOINT_WEIGHTS,
    COMPONENT_FOLDERS,
    EXPORTED_CKPT,
    FOLDERS,
    FURTHER_FOLDERS,
    NOT_TEXT_TO_IMAGE,
    find_component,
    is_checkpoint,
    is_tokenizer,
    whole_model,
)
from .formats.files import read_arrays, read_component_arrays, read_names, weight_files
from .model_file import MODEL_FILE, TOKENIZER_FOLDER, TRANSFORMER, has_model_file, kind_of, read_model_file

# What diffusers called the layers of the VAE's attention before 0.17.
_OLD_VAE_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_UNUSED = "caption_projection.y_embedding"  # of a DiT: random numbers
# Of a whole CLIP, which encodes captions and pictures.
_PARTS_OF_CLIP = {
    "text_encoder": ("text_model.",), "projected_text_encoder": ("text_model.", "text_projection."),
    "image_encoder": ("vision_model.", "visual_projection."),
}  # fmt: skip
_ONE_SET_OF_WEIGHTS = "{} has one set of weights; averaged ones are in checkpoints and .ckpt files"
_TORCH_SUFFIXES = (".ckpt", ".bin", ".pt", ".pth", ".safetensors")


def read_weights(
    path, kinds=tuple(FOLDERS), yaml_file=None, ema: bool = False, prediction_type: str | None = None,
    zero_snr: bool = False, assumed_prediction: str | None = None,
) -> Weights:  # fmt: skip
    """The components `kinds`, of those that are at `path`. `yaml_file`: of a .ckpt, by default the .yaml beside it,
    else what its shapes say; for a checkpoint without model.json, config.json of its VAE. `ema`: the averaged weights.
    `prediction_type`: of a single file, whatever it says; `assumed_prediction`: of one that must say it and does not.
    `zero_snr`: the last timestep is pure noise, whether or not the model says so. Raises ModelError."""
    path = _whole_model(path)
    if path.is_file():
        if path.suffix not in _TORCH_SUFFIXES:
            raise ModelError(f"{path} is not a model: give a pipeline folder, a checkpoint folder, or a single file")
        from .layouts.compvis import read_compvis

        weights = read_compvis(path, kinds, yaml_file, ema, (prediction_type, assumed_prediction, zero_snr))
        weights.tokenizer = find_tokenizer(path)
        return weights
    if not path.is_dir():
        raise ModelError(f"no folder {path}; give that of an exported pipeline, a checkpoint, or a .ckpt file")
    if prediction_type:
        raise ModelError(f"--prediction-type is for a single file, and {path} says itself what it predicts; omit it")
    if ema and not is_checkpoint(path):
        raise ModelError(_ONE_SET_OF_WEIGHTS.format(path))
    weights = _read_checkpoint(path, kinds, yaml_file, ema) if is_checkpoint(path) else _read_pipeline(path, kinds)
    if zero_snr:
        weights.scheduler = {**weights.scheduler, "rescale_betas_zero_snr": True}
        check_schedule(PUBLISHED_SCHEDULE | weights.scheduler, path)
    return weights


def find_tokenizer(path: Path) -> Path | None:
    """The tokenizer folder of a pipeline, of one of its components, or of a checkpoint, if it has one."""
    if is_checkpoint(path) and not has_model_file(path):
        from .layouts.older import find_older_tokenizer

        return find_older_tokenizer(path)
    own = (path / "tokenizer", path, path.parent / "tokenizer")
    if found := next((folder for folder in own if is_tokenizer(folder)), None):
        return found
    if not path.is_file() or path.suffix not in _TORCH_SUFFIXES:
        return None
    from ..config.clip_vocabulary import vocabulary_folder
    from .layouts.single_file import has_clip, is_open_clip

    names = read_names(path)
    return vocabulary_folder("open-clip" if is_open_clip(names) else "clip") if has_clip(names) else None


def read_component(kind: str, path, yaml_file=None, ema: bool = False) -> ComponentWeights:
    """One component: from its own folder or file, a pipeline's folder, a checkpoint, or a .ckpt. Raises ModelError."""
    path = _whole_model(path)
    is_further, is_folder = kind in FURTHER_FOLDERS, path.is_dir() and not is_checkpoint(path)
    folder = find_component(path, kind) if is_folder else None
    if ema and (folder or is_further) and path.exists() and not is_checkpoint(path):
        raise ModelError(_ONE_SET_OF_WEIGHTS.format(path))
    if is_folder:
        return _read_checked(kind, folder) if folder else _read_component_folder(kind, path)
    if path.is_file() and (is_further or kind == TRANSFORMER):
        from .layouts.published import read_published

        return read_published(kind, path, yaml_file if is_further else None)
    if is_further and path.is_dir():
        described = read_model_file(path)
        family = get_family(described.family)
        name = next((name for name in described.components if kind_of(family, name) == kind), None)
        if name is None or described.adapters:
            raise ModelError(f"{path} holds no {LABELS[kind]}; give another")
        _, arrays = _checkpoint_state(path, (name,), ema)
        return ComponentWeights(described.components[name].config, arrays[name], str(path))
    components = read_weights(path, (kind,), yaml_file, ema).components
    if kind not in components:
        raise ModelError(f"{path} holds no {kind}; give another")
    return components[kind]


def _whole_model(path) -> Path:
    """The .ckpt of a folder that has it in place of components; else the path itself."""
    path = Path(path).expanduser()
    is_exported = (path / EXPORTED_CKPT).is_file() and not any(find_component(path, kind) for kind in COMPONENT_FOLDERS)
    return path / EXPORTED_CKPT if is_exported else path


def _read_pipeline(path: Path, kinds) -> Weights:
    folders = {kind: find_component(path, kind) for kind in kinds}
    if not any(folders.values()):
        names = " or ".join(name for kind in kinds for name in COMPONENT_FOLDERS.get(kind, ()))
        raise ModelError(f"{path} has no folder {names}: it is not an exported pipeline, nor a checkpoint; name one")
    weights = Weights(scheduler=dict(PUBLISHED_SCHEDULE), metadata=_said(path))
    weights.metadata.pop("files", None)
    for kind, folder in folders.items():
        if folder:
            weights.components[kind] = _read_checked(kind, folder)
    if (path / "scheduler" / "scheduler_config.json").is_file():
        weights.scheduler |= read_scheduler(path / "scheduler" / "scheduler_config.json")
    weights.tokenizer = find_tokenizer(path)
    return weights


def read_cascade(path, config_file=None, ema: bool = False) -> Weights | None:
    """A prior or decoder of Stable Cascade with all that lies beside it, from a checkpoint, a pipeline's folder or a
    single file; None where `path` holds neither. `config_file`: of a single file. Raises ModelError."""
    from .layouts.published import STAGES, holds_stage

    path, described = Path(path).expanduser(), None
    if path.is_file():
        kinds = [kind for kind in STAGES if path.suffix == ".safetensors" and holds_stage(kind, path)]
    elif is_checkpoint(path):
        described = read_model_file(path) if has_model_file(path) else None
        kinds = [kind_of(get_family(described.family), name) for name in described.components] if described else []
    else:
        kinds = [kind for kind in FURTHER_FOLDERS if find_component(path, kind)]
    if not set(STAGES).intersection(kinds):
        return None
    kinds, process = [kind for kind in kinds if kind in FURTHER_FOLDERS], described and described.process
    said = _said(path, "manifest.json" if is_checkpoint(path) else "ppldm.json")
    said = {**said.get("identity", {}), **said}
    metadata = {key: value for key, value in said.items() if not isinstance(value, (dict, list))}
    components = {kind: read_component(kind, path, config_file, ema) for kind in kinds}
    tokenizer = find_tokenizer(path) if path.is_dir() else None
    return Weights(components, dict(process or {}), tokenizer, metadata)


def _said(folder: Path, name: str = "ppldm.json") -> dict:
    return read_json_object(folder / name, ModelError, inside=True) if (folder / name).is_file() else {}


def _read_checked(kind: str, folder: Path) -> ComponentWeights:
    """A component from its folder in a pipeline's, whose ppldm.json may know the files."""
    component, known = _read_component_folder(kind, folder), _said(folder.parent).get("files")
    names = [f"{folder.name}/{file.name}" for file in weight_files(folder)]
    remedy = "copy it again, or, if you changed it, delete its line in ppldm.json"
    _check_files(folder.parent, known if isinstance(known, dict) else {}, names, remedy)
    return component


def _read_component_folder(kind: str, folder: Path) -> ComponentWeights:
    config = read_config(kind, folder)
    arrays = read_component_arrays(folder)
    if kind == "vae":
        arrays = {_modern_vae_name(name): array for name, array in arrays.items()}
    if (own := _PARTS_OF_CLIP.get(kind)) and not (kind == "text_encoder" and is_ldmbert(config)):
        arrays = {name: array for name, array in arrays.items() if name.startswith(own)}
    if kind == TRANSFORMER:
        from .layouts.published import without_tables

        arrays.pop(_UNUSED, None)
        arrays = without_tables(arrays)
    if "embeddings.word_embeddings.weight" in arrays:
        from .layouts.older import modern_text_encoder

        arrays = modern_text_encoder(arrays, config, folder)
    # Position numbers, which older versions of transformers stored with the weights, are computed.
    arrays = {name: array for name, array in arrays.items() if not name.endswith("position_ids")}
    return ComponentWeights(config, arrays, str(folder))


def _modern_vae_name(name: str) -> str:
    """The name of a VAE's parameter today, from today's or that of a diffusers before 0.17."""
    start, found, rest = name.partition(".attentions.0.")
    layer, dot, leaf = rest.rpartition(".")
    return f"{start}{found}{_OLD_VAE_ATTENTION.get(layer, layer)}{dot}{leaf}" if found else name


def _read_checkpoint(path: Path, kinds, config_file, ema: bool) -> Weights:
    manifest, arrays = _checkpoint_state(path, kinds, ema)
    arrays = {kind: own for kind, own in arrays.items() if own}
    if has_model_file(path):
        weights = _described(path, arrays)
    else:
        from .layouts.older import read_older_checkpoint

        weights = read_older_checkpoint(path, arrays, config_file, read_weights, read_component)
    weights.metadata |= {
        "global_step": manifest["global_step"],
        "samples_seen": manifest["samples_seen"],
        **kept_of(manifest),
        **manifest["identity"],
        "ema": ema,
    }
    return weights


def _checkpoint_state(path: Path, names, ema: bool) -> tuple[dict, dict]:
    """(manifest, arrays of each of the components `names`) of a checkpoint that is whole."""
    manifest = read_json_object(path / "manifest.json", ModelError, inside=True)
    files = (CHECKPOINT_WEIGHTS, CHECKPOINT_AVERAGE) if ema else (CHECKPOINT_WEIGHTS,)
    tokenizer = [f"{TOKENIZER_FOLDER}/{file.name}" for file in sorted((path / TOKENIZER_FOLDER).glob("*"))]
    own = (MODEL_FILE,) if has_model_file(path) else ()
    _check_files(path, manifest.get("files", {}), (*own, *tokenizer, *files), "choose another checkpoint")
    state = read_arrays(path / CHECKPOINT_WEIGHTS, lambda key: key.startswith(tuple(f"{name}." for name in names)))
    if ema:
        if not (path / CHECKPOINT_AVERAGE).is_file():
            raise ModelError(f"{path} holds no averaged weights; the run was without --use_ema")
        state |= {key: array for key, array in read_arrays(path / CHECKPOINT_AVERAGE).items() if key in state}
    return manifest, {
        name: {key.removeprefix(f"{name}."): array for key, array in state.items() if key.startswith(f"{name}.")}
        for name in names
    }


def _described(path: Path, arrays: dict[str, dict]) -> Weights:
    """The components of a checkpoint with the `arrays` of each, as its model.json describes them."""
    described = read_model_file(path)
    if not {*whole_model(described.components)} <= described.components.keys():
        raise ModelError(NOT_TEXT_TO_IMAGE.format(path))
    if described.adapters:
        raise ModelError(
            f"{path} holds adapters and not the model that they are for; give that, and the run's lora folder as --lora"
        )
    check_schedule(PUBLISHED_SCHEDULE | described.process, path / MODEL_FILE)
    return Weights(
        {kind: ComponentWeights(described.components[kind].config, own, str(path)) for kind, own in arrays.items()},
        described.process,
        path / TOKENIZER_FOLDER,
        {"model_max_length": described.tokenizer["max_length"]},
        tuple(kind for kind, component in described.components.items() if not component.trained),
    )


def _check_files(folder: Path, known: dict, names, remedy: str) -> None:
    """Raises ModelError where a file has not the size and CRC-32 of `known`, which has those of some files by name."""
    for name in names:
        try:
            if name in known and checksum_file(folder / name) != known[name]:
                raise ModelError(f"{folder / name} has changed or is cut short; {remedy}")
        except OSError as error:
            raise ModelError(f"cannot read {folder / name}: {error.strerror}; {remedy}") from error
