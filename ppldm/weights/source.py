"""A model, whatever form it has: recognised once, by `open_model`, it travels as an object that knows what it is.

    FOLDER        of a pipeline, written by ppldm, ppdiffusers, diffusers, or the older training scripts; or of one
                  component
    FILE          CompVis' .ckpt, with its YAML file; also by the folder that `ppldm export --to compvis` wrote; Stable
                  Diffusion 1.x or 2.x, .safetensors or .ckpt, with or without a YAML file; a network as published;
                  PaddleMIX's model_state.pdparams, or the folder that it lies in
    CHECKPOINT    checkpoint-<step>/ of a ppldm run: its model.json and tokenizer/ say what it is; older ones: `older`

No pickle is run. What only some of these forms need is imported where one is read.
"""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

from ..config.network_files import beside, sd3_vocabularies, vocabulary_folder
from ..diffusion.drawing import kept_of
from ..families.base import get_family
from ..networks.configs import LABELS, is_ldmbert, is_sd3, is_sdxl, is_t5
from ..utils.checksums import checksum_file
from ..utils.errors import ModelError
from ..utils.files import read_json_object
from .components import ComponentWeights, Weights, modern_vae_name
from .configs import (
    CONFIG_FILES,
    PUBLISHED_SCHEDULE,
    ZEROS_IF_EMPTY,
    check_schedule,
    read_config,
    read_scheduler,
)
from .fetch import locate_model, packaged_or
from .folders import (
    CHECKPOINT,
    CHECKPOINT_AVERAGE,
    CHECKPOINT_WEIGHTS,
    COMPONENT_FOLDERS,
    FILE,
    FOLDER,
    FOLDERS,
    FURTHER_FOLDERS,
    FURTHER_TEXT_ENCODERS,
    NOT_TEXT_TO_IMAGE,
    find_component,
    is_open_clip_folder,
    is_tokenizer,
    recognise,
    whole_model,
)
from .formats.files import read_arrays, read_component_arrays, read_names, weight_files
from .model_file import MODEL_FILE, TOKENIZER_FOLDER, TRANSFORMER, has_model_file, kind_of, read_model_file, read_said

_UNUSED = "caption_projection.y_embedding"  # of a DiT: random numbers
# Of a whole CLIP, which encodes captions and pictures.
_PARTS_OF_CLIP = {
    "text_encoder": ("text_model.",),
    **dict.fromkeys(("projected_text_encoder", "text_encoder_2"), ("text_model.", "text_projection.")),
    "image_encoder": ("vision_model.", "visual_projection."),
}  # fmt: skip
_TORCH_SUFFIXES, _STATE_SUFFIX = (".ckpt", ".bin", ".pt", ".pth", ".safetensors"), ".pdparams"


def open_model(name_or_path, offline: bool = False, kinds=tuple(COMPONENT_FOLDERS), **told) -> "ModelSource":
    """The model of a place or a name, downloaded where it is missing. `kinds`: the components that are wanted of it;
    `told`: what it is read by, as `ModelSource` has it. Raises ModelError."""
    return ModelSource(*recognise(locate_model(name_or_path, offline, kinds)), **told)


def read_component(kind: str, name_or_path, offline: bool = False, **told) -> ComponentWeights:
    """One component of `open_model`: of its own folder or file, a pipeline's, a checkpoint, or a .ckpt."""
    return open_model(name_or_path, offline, (kind,), **told).component(kind)


def config_here(kind: str, name: str) -> dict | None:
    """The config of a component, where a folder that is here is or holds it; None of others. Raises ModelError."""
    return ModelSource(*recognise(Path(packaged_or(name)).expanduser())).config(kind)


def may_hold(kind: str, name: str) -> bool:
    """False where a whole model that is here has no such component."""
    path = Path(packaged_or(name)).expanduser()
    return not path.exists() or ModelSource(*recognise(path)).holds(kind)


@dataclass(frozen=True)
class ModelSource:
    """A model that is here. config_file: of a .ckpt its YAML file, by default the one beside it, else what its shapes
    say; of a .pdparams the folder of its JSON files; of a network as published its config; of a checkpoint without
    model.json config.json of its VAE. ema: the averaged weights. prediction_type: of a single file, whatever it says;
    assumed_prediction: of one that must say it and does not. zero_snr: the last timestep is pure noise, whether or not
    the model says so."""

    path: Path
    form: str
    config_file: Path | str | None = None
    ema: bool = False
    prediction_type: str | None = None
    assumed_prediction: str | None = None
    zero_snr: bool = False

    @cached_property
    def described(self):
        """The ModelDescription of a checkpoint; None of older ones and of other forms. Raises ModelError."""
        return read_model_file(self.path) if self.form == CHECKPOINT and has_model_file(self.path) else None

    @property
    def tokenizer(self) -> Path | None:
        """The folder of its tokenizer, in or beside it, or of the package for a file with a CLIP; None without one."""
        if self.form == CHECKPOINT and not self.described:
            from .layouts.older import find_older_tokenizer

            return find_older_tokenizer(self.path)
        if is_open_clip_folder(self.path):
            return vocabulary_folder("open-clip")
        near = self.path.parent / TOKENIZER_FOLDER
        own = [self.path / TOKENIZER_FOLDER, self.path, beside(near, self.path.name), near]
        own += [self.path.parent] * (self.path.suffix == _STATE_SUFFIX)
        found = next((folder for folder in own if is_tokenizer(folder)), None)
        if found or self.form != FILE or self.path.suffix not in _TORCH_SUFFIXES:
            return found
        from .layouts.single_file import has_clip, is_open_clip

        names = read_names(self.path)
        if self._layout:
            return sd3_vocabularies()
        return vocabulary_folder("open-clip" if is_open_clip(names) else "clip") if has_clip(names) else None

    @cached_property
    def _layout(self):
        """The module that reads a single file of Stable Diffusion 3 or XL; None of others."""
        from .layouts.single_file import SECOND_TEXT, THIRD

        names, starts = read_names(self.path), {"sd3": THIRD, "sdxl": SECOND_TEXT}
        found = next((one for one, start in starts.items() if any(name.startswith(start) for name in names)), None)
        return found and import_module(f".layouts.{found}", __package__)

    def tokenizer_of(self, text_encoder: str) -> Path | None:
        """That of one of its text encoders."""
        own = self.tokenizer
        if own is None or text_encoder == "text_encoder":
            return own
        found = beside(own, text_encoder)
        return found if is_tokenizer(found) else None

    def config(self, kind: str) -> dict | None:
        """The completed config of a component; None where it follows from weights alone. Raises ModelError."""
        if self.described:
            component = self.described.components.get(kind)
            return component.config if component else None
        folder = find_component(self.path, kind) or self.path
        return read_config(kind, folder) if any((folder / file).is_file() for file in CONFIG_FILES) else None

    def whole_config(self, kind: str) -> dict | None:
        """As `config`, where it is a whole model and not one component."""
        if self.form == FILE:
            found = self._layout and self.read((kind,)).components.get(kind)
            return found.config if found else None
        there = self.form == CHECKPOINT or find_component(self.path, kind)
        return self.config(kind) if there else None

    def holds(self, kind: str) -> bool:
        """Whether it has a component of a whole model."""
        if self.form == FILE:
            from .layouts.sd3 import PREFIXES, T5

            stored = any(name.startswith(PREFIXES[kind]) for name in read_names(self.path))
            return stored and (kind != T5 or has_model_file(self.path.parent))
        if self.form == CHECKPOINT:
            return kind in self._kinds().values()
        return find_component(self.path, kind) is not None

    def read(self, kinds=(*FOLDERS, *FURTHER_TEXT_ENCODERS)) -> Weights:
        """The components `kinds`, of those that are there. Raises ModelError."""
        path = self.path
        if self.form == FILE:
            if path.suffix == _STATE_SUFFIX:
                from .layouts.paddlemix import read_state

                return read_state(self, kinds)
            if path.suffix not in _TORCH_SUFFIXES:
                raise ModelError(
                    f"{path} is not a model: give a folder of a pipeline or a checkpoint, or a single file"
                )
            from .layouts.compvis import read_compvis

            if self._layout:
                self._refuse_average()
                return self._layout.read(self, kinds)
            weights = read_compvis(self, kinds)
            weights.tokenizer = self.tokenizer
            return weights
        if self.prediction_type:
            raise ModelError(
                f"--prediction-type is for a single file, and {path} says itself what it predicts; omit it"
            )
        weights = self._read_checkpoint(kinds) if self.form == CHECKPOINT else self._read_pipeline(kinds)
        if self.zero_snr:
            weights.scheduler = {**weights.scheduler, "rescale_betas_zero_snr": True}
            check_schedule(PUBLISHED_SCHEDULE | weights.scheduler, path)
        return weights

    def component(self, kind: str) -> ComponentWeights:
        """One component. Raises ModelError."""
        is_further, path = kind in FURTHER_FOLDERS, self.path
        folder = find_component(path, kind) if self.form == FOLDER else None
        if is_further or folder:
            self._refuse_average()
        if self.form == FOLDER:
            return _read_checked(kind, folder) if folder else _read_component_folder(kind, path)
        if self.form == FILE and (is_further or kind == TRANSFORMER) and self._layout:
            name = "text_encoder" if kind == "projected_text_encoder" else kind
            if name not in (found := self.read((name,)).components):
                raise ModelError(f"{path} holds no {LABELS[kind]}; give another")
            return found[name]
        if self.form == FILE and (is_further or kind == TRANSFORMER):
            from .layouts.published import read_published

            return read_published(kind, path, self.config_file if is_further else None)
        if is_further:
            name = next((name for name, one in self._kinds().items() if one == kind), None)
            if name is None or self.described.adapters:
                raise ModelError(f"{path} holds no {LABELS[kind]}; give another")
            _, arrays = self._state((name,))
            return ComponentWeights(self.described.components[name].config, arrays[name], str(path))
        components = self.read((kind,)).components
        if kind not in components:
            raise ModelError(f"{path} holds no {kind}; give another")
        return components[kind]

    def stages(self) -> Weights | None:
        """A prior or decoder of Stable Cascade with all that lies beside it; None where neither is there."""
        from .layouts.published import STAGES, holds_stage

        path = self.path
        if self.form == FILE:
            kinds = [kind for kind in STAGES if path.suffix == ".safetensors" and holds_stage(kind, path)]
        elif self.form == CHECKPOINT:
            kinds = [kind for kind in self._kinds().values() if kind in FURTHER_FOLDERS]
        else:
            kinds = [kind for kind in FURTHER_FOLDERS if find_component(path, kind)]
        if not set(STAGES).intersection(kinds):
            return None
        said = read_said(path, "manifest.json" if self.form == CHECKPOINT else "ppldm.json")
        said = {**said.get("identity", {}), **said}
        metadata = {key: value for key, value in said.items() if not isinstance(value, (dict, list))}
        process = dict(self.described and self.described.process or {})
        tokenizer = None if self.form == FILE else self.tokenizer
        return Weights({kind: self.component(kind) for kind in kinds}, process, tokenizer, metadata)

    def _kinds(self) -> dict[str, str | None]:
        """The kind of each component that a checkpoint describes, by name."""
        found = self.described
        return {name: kind_of(get_family(found.family), name) for name in found.components} if found else {}

    def _refuse_average(self) -> None:
        if self.ema and self.form != CHECKPOINT:
            raise ModelError(f"{self.path} has one set of weights; averaged ones are in checkpoints and .ckpt files")

    def _read_pipeline(self, kinds) -> Weights:
        self._refuse_average()
        folders = {kind: find_component(self.path, kind) for kind in kinds}
        third, xl = is_sd3(self.whole_config(TRANSFORMER) or {}), is_sdxl(self.whole_config("unet") or {})
        if not (third or xl):
            folders = {kind: folder for kind, folder in folders.items() if kind not in FURTHER_TEXT_ENCODERS}
        if not any(folders.values()):
            if len(kinds) > 1 and (self.path / "config.json").is_file():
                raise ModelError(NOT_TEXT_TO_IMAGE.format(self.path))
            what = " or ".join(folders)
            raise ModelError(f"{self.path} has no {what}: it is no pipeline or checkpoint; name one, or a run's folder")
        said = {name: value for name, value in read_said(self.path).items() if name != "files"}
        if xl and ZEROS_IF_EMPTY in (index := read_said(self.path, "model_index.json")):
            if not isinstance(zeros := index[ZEROS_IF_EMPTY], bool):
                raise ModelError(f"{self.path}: {ZEROS_IF_EMPTY} {zeros!r:.60} is neither true nor false; correct it")
            said["empty_caption"] = "zeros" if zeros else "embedding"
        named = {"text_encoder": "projected_text_encoder"} if third else {}
        components = {kind: _read_checked(named.get(kind, kind), folder) for kind, folder in folders.items() if folder}
        stored = self.path / "scheduler" / "scheduler_config.json"
        scheduler = PUBLISHED_SCHEDULE | (read_scheduler(stored) if stored.is_file() else {})
        return Weights(components, scheduler, self.tokenizer, said)

    def _read_checkpoint(self, kinds) -> Weights:
        manifest, arrays = self._state(kinds)
        described = self.described
        arrays = {kind: own for kind, own in arrays.items() if own or (described and kind in described.components)}
        if not described:
            from .layouts.older import read_older_checkpoint

            weights = read_older_checkpoint(self.path, arrays, self.config_file, open_model)
        elif not {*whole_model(found := described.components)} <= found.keys():
            raise ModelError(NOT_TEXT_TO_IMAGE.format(self.path))
        elif described.adapters:
            raise ModelError(
                f"{self.path} holds adapters and not the model that they are for; give that, and the run's lora folder "
                "as --lora"
            )
        else:
            check_schedule(PUBLISHED_SCHEDULE | described.process, self.path / MODEL_FILE)
            components = {
                kind: ComponentWeights(found[kind].config, own, str(self.path)) for kind, own in arrays.items()
            }
            frozen = tuple(kind for kind, component in found.items() if not component.trained)
            length = {"model_max_length": described.tokenizer["max_length"]}
            weights = Weights(components, described.process, self.path / TOKENIZER_FOLDER, length, frozen)
        numbers = {name: manifest[name] for name in ("global_step", "samples_seen")}
        weights.metadata |= {**numbers, **kept_of(manifest), **manifest["identity"], "ema": self.ema}
        return weights

    def _state(self, names) -> tuple[dict, dict]:
        """(manifest, arrays of each of the components `names`) of a checkpoint that is whole."""
        path, manifest = self.path, read_json_object(self.path / "manifest.json", ModelError, inside=True)
        files = (CHECKPOINT_WEIGHTS, CHECKPOINT_AVERAGE) if self.ema else (CHECKPOINT_WEIGHTS,)
        tokenizer = [str(file.relative_to(path)) for file in sorted(path.glob(f"{TOKENIZER_FOLDER}*/*"))]
        own = (MODEL_FILE,) if has_model_file(path) else ()
        _check_files(path, manifest.get("files", {}), (*own, *tokenizer, *files), "choose another checkpoint")
        state = read_arrays(path / CHECKPOINT_WEIGHTS, lambda key: key.startswith(tuple(f"{name}." for name in names)))
        if self.ema:
            if not (path / CHECKPOINT_AVERAGE).is_file():
                raise ModelError(f"{path} holds no averaged weights; the run was without --use_ema")
            state |= {key: array for key, array in read_arrays(path / CHECKPOINT_AVERAGE).items() if key in state}
        return manifest, {
            name: {key.removeprefix(f"{name}."): array for key, array in state.items() if key.startswith(f"{name}.")}
            for name in names
        }


def _read_checked(kind: str, folder: Path) -> ComponentWeights:
    """A component from its folder in a pipeline's, whose ppldm.json may know the files."""
    component, known = _read_component_folder(kind, folder), read_said(folder.parent).get("files")
    names = [f"{folder.name}/{file.name}" for file in weight_files(folder)]
    remedy = "copy it again, or, if you changed it, delete its line in ppldm.json"
    _check_files(folder.parent, known if isinstance(known, dict) else {}, names, remedy)
    return component


def _read_component_folder(kind: str, folder: Path) -> ComponentWeights:
    config = read_config(kind, folder)
    if kind in ("text_encoder", "text_encoder_3") and is_t5(config):
        from .layouts.published import read_t5

        return ComponentWeights(config, read_t5(folder), str(folder))
    own = ("",) if kind == "text_encoder" and is_ldmbert(config) else _PARTS_OF_CLIP.get(kind, ("",))
    if is_open_clip_folder(folder):
        from .layouts.open_clip import read_text_encoder

        return ComponentWeights(config, read_text_encoder(folder, own), str(folder))
    arrays = read_component_arrays(folder, lambda name: name.startswith(own))
    if kind == "vae":
        arrays = {modern_vae_name(name): array for name, array in arrays.items()}
    if kind == TRANSFORMER:
        from .layouts.published import without_tables

        arrays.pop(_UNUSED, None)
        if is_sd3(config):  # biases that ppdiffusers gives norms which have none: zeros
            arrays = {name: one for name, one in arrays.items() if not name.endswith(".norm.bias") or one.any()}
        arrays = without_tables(arrays)
    if "embeddings.word_embeddings.weight" in arrays:
        from .layouts.older import modern_text_encoder

        arrays = modern_text_encoder(arrays, config, folder)
    # Position numbers, which older versions of transformers stored with the weights, are computed.
    arrays = {name: array for name, array in arrays.items() if not name.endswith("position_ids")}
    return ComponentWeights(config, arrays, str(folder))


def _check_files(folder: Path, known: dict, names, remedy: str) -> None:
    """Raises ModelError where a file has not the size and CRC-32 of `known`, which has those of some files by name."""
    for name in names:
        try:
            if name in known and checksum_file(folder / name) != known[name]:
                raise ModelError(f"{folder / name} has changed or is cut short; {remedy}")
        except OSError as error:
            raise ModelError(f"cannot read {folder / name}: {error.strerror}; {remedy}") from error
