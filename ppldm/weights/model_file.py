"""model.json: what a checkpoint or an exported model is made of, so that it is read with nothing else beside it.

    {"format": 1, "family": "ldm",
     "components": {"vae": {"class": "AutoencoderKL", "trained": false, "config": {…}, "crc32": "0123abcd"}, …},
     "process": {"num_train_timesteps": 1000, "beta_start": …, …, "prediction_type": "epsilon"},
     "tokenizer": {"class": "BertTokenizer", "max_length": 77, "crc32": "89abcdef"}}

A config holds all arguments of the network's class. `crc32` of a component is that of frozen weights; the tokenizer's
that of what decides its ids. `process` and `tokenizer` are null where a family has none. Nothing here imports paddle.
"""

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..families.base import Family, get_family
from ..networks.configs import LABELS, check_config, is_ldmbert, is_sdxl, network_class, table_of
from ..utils.checksums import checksum_json
from ..utils.errors import ConfigError, ModelError
from ..utils.files import make_output_dir, parse_json_object, read_json_object, write_json

MODEL_FILE = "model.json"
TOKENIZER_FOLDER = "tokenizer"
FORMAT = 1
LDM, STABLE_DIFFUSION, CONTROLNET = "ldm", "stable_diffusion", "controlnet"
TRANSFORMER = "transformer"  # the component; its table of settings has the name of its family
_DIFFUSERS_CLASSES = dict.fromkeys(("cascade_prior", "cascade_decoder"), "StableCascadeUNet")  # of kinds that it has
_TOKENIZER_SETTINGS = ("do_lower_case", "pad_token")
_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "spiece.model", "tokenizer.json")
_TOKENIZERS = {"merges.txt": "CLIPTokenizer", "vocab.txt": "BertTokenizer"}  # by a file that each has
_TOKENIZERS |= dict.fromkeys(("spiece.model", "tokenizer.json"), "T5Tokenizer")
_ADAPTERS = {"lora": "LoraAdapter", "tokens": "TokensAdapter"}  # by the end of their names
_OF_METHODS = {"projector": "Projector"}  # likewise; `ppldm.methods`
TEACHER = "_teacher"  # likewise, behind the name of what learns from it


@dataclass(frozen=True)
class Component:
    """One network: its completed config, whether it is trained, and the checksum of weights that do not change."""

    config: dict
    trained: bool
    crc32: str | None = None


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer as its files, by name, and the length to which captions are padded or cut. Those of further text
    encoders have the names of their folders before them: tokenizer_2/vocab.json."""

    max_length: int
    files: dict[str, bytes] = field(repr=False)

    @property
    def class_name(self) -> str:
        """The name of its class in PaddleNLP and transformers."""
        return next((name for file, name in _TOKENIZERS.items() if file in self.files), "CLIPTokenizer")

    @property
    def crc32(self) -> str:
        """Of what decides the ids: vocabulary, merges, lower-casing, padding. Not of how JSON files are written."""
        checksum = 0
        for folder in sorted({name.rpartition("/")[0] for name in self.files}):
            own = {name.rpartition("/")[2]: name for name in self.files if name.rpartition("/")[0] == folder}
            checksum = replace(self, files={file: self.files[name] for file, name in own.items()})._crc32(checksum)
        return f"{checksum:08x}"

    def _crc32(self, start: int) -> int:
        """Of the files of one folder, behind others."""
        settings = {}
        for name in sorted(name for name in self.files if name.endswith("config.json") or name.endswith("map.json")):
            found = parse_json_object(self.files[name], f"{name} of the tokenizer", ModelError)
            settings |= {key: found[key] for key in _TOKENIZER_SETTINGS if found.get(key) is not None}
            settings |= {"ftfy": True} if found.get("ftfy") else {}  # without: as before there was the choice
        pad = settings.get("pad_token")
        settings["pad_token"] = pad.get("content") if isinstance(pad, dict) else pad
        vocabularies = b"".join(self.files[name] for name in _VOCABULARIES if name in self.files)
        return zlib.crc32(vocabularies, checksum_json(settings) ^ start)


def read_tokenizer_files(model: Path, max_length: int) -> TokenizerFiles:
    """Those in the folder of a model."""
    own = sorted((model / TOKENIZER_FOLDER).glob("*"))
    further = sorted(model.glob(f"{TOKENIZER_FOLDER}_*/*"))
    found = {path.name: path for path in own} | {f"{path.parent.name}/{path.name}": path for path in further}
    return TokenizerFiles(max_length, {name: path.read_bytes() for name, path in found.items()})


@dataclass(frozen=True)
class ModelDescription:
    """What model.json says. `process`: the noise schedule and the kind of prediction, None where there is none."""

    family: str
    components: dict[str, Component]
    process: dict | None = None
    tokenizer: dict | None = None  # class, max_length, crc32
    tokenizer_files: TokenizerFiles | None = None  # to be written; a description that was read leaves them on the disk

    def write(self, folder) -> None:
        """Write model.json, and the tokenizer's files where they are known, into `folder`."""
        family = get_family(self.family)
        components = {
            name: {
                "class": class_of(kind_of(family, name), component.config),
                **{key: value for key, value in asdict(component).items() if value is not None},
            }
            for name, component in self.components.items()
        }
        write_json(
            Path(folder, MODEL_FILE),
            {
                "format": FORMAT,
                "family": self.family,
                "components": components,
                "process": self.process,
                "tokenizer": self.tokenizer,
            },
        )
        if self.tokenizer_files:
            target = make_output_dir(Path(folder, TOKENIZER_FOLDER))
            for name, content in self.tokenizer_files.files.items():
                file = Path(folder, name) if "/" in name else target / name
                make_output_dir(file.parent)
                file.write_bytes(content)

    @property
    def adapters(self) -> list[str]:
        """The components that are adapters: of a checkpoint that has them the only ones whose weights it holds."""
        return [name for name in self.components if name.rpartition("_")[2] in _ADAPTERS]

    @property
    def num_bytes(self) -> int:
        """The size of the tokenizer's files, which `write` writes."""
        return sum(map(len, self.tokenizer_files.files.values())) if self.tokenizer_files else 0

    def settings(self) -> dict[str, dict]:
        """What a run must not change unasked: components' configs and frozen weights, the process, the tokenizer."""
        found = {
            name: component.config | ({"weights": component.crc32} if component.crc32 else {})
            for name, component in self.components.items()
        }
        others = {"process": self.process, "tokenizer": self.tokenizer}
        return found | {name: value for name, value in others.items() if value is not None}


def describe(family: str, components: dict[str, Component], process=None, tokenizer: TokenizerFiles | None = None):
    """The ModelDescription of a model that is there, with its tokenizer's files."""
    entry = None
    if tokenizer:
        entry = {"class": tokenizer.class_name, "max_length": tokenizer.max_length, "crc32": tokenizer.crc32}
    return ModelDescription(family, components, process, entry, tokenizer)


def kind_of(family: Family, name: str) -> str | None:
    """The kind of a component, an adapter's too, as `Family.components` says it; None for one that is not known."""
    return family.components.get(name.removesuffix(TEACHER)) or (_ADAPTERS | _OF_METHODS).get(name.rpartition("_")[2])


def family_of(components: Mapping[str, Any]) -> Family:
    """That of a text-to-image model, by its components, which have configs."""
    if TRANSFORMER in components:
        return get_family(table_of(TRANSFORMER, components[TRANSFORMER].config))
    if CONTROLNET in components:
        return get_family(CONTROLNET)
    if "unet" in components and is_sdxl(components["unet"].config):
        return get_family("sdxl")
    return get_family(LDM if is_ldmbert(components["text_encoder"].config) else STABLE_DIFFUSION)


def class_of(kind: str, config: dict) -> str:
    """The class that a component of this kind (`Family.components`) is built with."""
    if kind not in LABELS:
        return kind
    return _DIFFUSERS_CLASSES.get(kind) or network_class(kind, config).rpartition(".")[2]


def read_said(folder: Path, name: str = "ppldm.json") -> dict:
    """What the training said of a model, in `folder`; nothing where no such file is there. Raises ModelError."""
    return read_json_object(folder / name, ModelError, inside=True) if (folder / name).is_file() else {}


def has_model_file(folder) -> bool:
    """False for the checkpoints of older versions."""
    return Path(folder, MODEL_FILE).is_file()


def read_model_file(folder) -> ModelDescription:
    """The description in `folder`: every config is whole. Its checksum is the caller's matter. Raises ModelError."""
    path = Path(folder, MODEL_FILE)
    try:
        value = read_json_object(path, ModelError, "copy the folder again", inside=True)
        if not isinstance(value["format"], int):
            raise TypeError("no object with a format")
        if value["format"] > FORMAT:
            raise ModelError(f"{path} has format {value['format']}, of a later version of ppldm; update this one")
        family = get_family(value["family"])
        components = {name: _read_component(family, name, entry, path) for name, entry in value["components"].items()}
        description = ModelDescription(value["family"], components, value["process"], value["tokenizer"])
    except ConfigError as error:
        raise ModelError(f"{path}: {error}") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is damaged ({type(error).__name__}: {error}); copy the folder again") from error
    if missing := [name for name in family.components if name not in {*components, *family.optional}]:
        raise ModelError(f"{path} does not describe {', '.join(missing)}; copy the folder again")
    if family.needs_process and not isinstance(description.process, dict):
        raise ModelError(f"{path} does not describe the noise schedule; copy the folder again")
    return description


def _read_component(family: Family, name: str, entry: dict, path: Path) -> Component:
    kind = kind_of(family, name)
    if kind is None:
        raise ModelError(f"{path}: component {name!r} is not known; known: {', '.join(family.components)}")
    config = check_config(kind, entry["config"], path) if kind in LABELS else dict(entry["config"])
    if lacking := config.keys() - entry["config"].keys():
        raise ModelError(f"{path}: the config of {name} does not say {', '.join(sorted(lacking))}; copy it again")
    if entry["class"] != class_of(kind, config) or not isinstance(entry["trained"], bool):
        raise ModelError(f"{path}: {name} of class {entry['class']!r} is not known; copy the folder again")
    return Component(config, entry["trained"], entry.get("crc32"))
