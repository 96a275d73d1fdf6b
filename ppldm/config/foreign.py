"""`ppldm config`: config files of open-diffusion and of Stable Cascade's training, translated to recipes.

A table for each in foreign.yaml says what becomes of every key that it knows: the settings here that mean the same, or
why there are none; and what their code does unasked. The site shows these tables.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml

from ..utils.errors import ConfigError
from ..utils.files import check_address, is_address, read_given_text, read_json_object, write_text
from ..utils.text import did_you_mean
from .load import Setting, read_yaml, tree_of
from .recipe import write_settings
from .training import OPTIMIZERS

_Out = Annotated[str, {"opt": True, "required": True}]
_PIPE = re.compile(r"pipe: *(?:aws s3 cp|gsutil (?:cp|cat)|curl(?: -\S+)*|hdfs dfs -cat) +(?P<address>\S+)(?: +-)?")

# What diffusers' DDPMScheduler has where its settings do not say it, and what must be among these.
_DDPM = {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear",
         "prediction_type": "epsilon", "rescale_betas_zero_snr": False}  # fmt: skip
_BETAS = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012}

# By the class of open-diffusion's data sets, what filelists call it; and how its files end.
_FORMATS = {**dict.fromkeys(("WebDataset", "ClassificationWebDataset"), "webdataset"),
            **dict.fromkeys(("parquet", "ParquetDataset"), "parquet")}  # fmt: skip
_SUFFIXES = {"webdataset": "tar", "parquet": "parquet"}

# By the class of a filter of control images: ours, of its parameters the names here, and its defaults.
_SMALLER = {"scale_factor": ("scale",)}
_FILTERS: dict[str, tuple[str, dict, dict]] = {
    "CannyFilter": ("canny,channels=1", {"resize": ("resize",)}, {}),
    "SRFilter": ("super-resolution", _SMALLER, {"scale_factor": 0.25}),
    "SREffnetFilter": ("super-resolution", _SMALLER, {"scale_factor": 0.5}),
    "InpaintFilter": (
        "inpainting", {"thresold": ("threshold_low", "threshold_high"), "p_outpaint": ("p_outpaint",)}, {}
    ),
}  # fmt: skip


class NoCounterpart(Exception):
    """A value that cannot be translated; its text is the reason."""


def place_of(text: str, format: str) -> str:
    """The line of a filelist that means the same, braces and all. A pipe that only copies is its address, a folder of
    a store its files of this format."""
    copied = _PIPE.fullmatch(text.strip())
    place = copied["address"] if copied else text
    if is_address(place):
        named = "." in re.sub(r"\{\d+\.\.\d+\}", "", place).rpartition("/")[2]
        return check_address(place if named else f"{place.rstrip('/')}/**/*.{_SUFFIXES[format]}")
    if place.startswith("pipe:") or "://" in place.replace("file://", ""):
        raise NoCounterpart(f"{place} cannot be read here: mount it or copy it, and write a filelist of the parts")
    return str(Path(re.sub("^file:(//)?", "", place)).absolute())


def control_filter(config: dict) -> str:
    """What `--control` means the same as the filter in a config of Stable Cascade's trainer. Raises NoCounterpart."""
    name, given = config.get("controlnet_filter"), config.get("controlnet_filter_params") or {}
    ours, names, unsaid = _FILTERS.get(name, (None, {}, {}))
    if ours is None or given.keys() - names.keys():
        shown = ", ".join([str(name), *sorted(given.keys() - names.keys())])
        raise NoCounterpart(f"{shown} is not a filter here; make one of your own: model.control package.module:Class")
    values = {key: value if isinstance(value, list) else [value] for key, value in (unsaid | given).items()}
    pairs = [pair for key in values for pair in zip(names[key], values[key], strict=False)]
    return ",".join([ours, *(f"{key}={value}" for key, value in pairs)])


def config(
    action: Annotated[str, {"choices": ["import"]}],  # import: a config of open-diffusion or Stable Cascade
    file: str,  # the YAML file
    out: _Out,  # recipe to write; a filelist and a UNet's config go beside it
    num_devices: int = 1,  # that the recipe is for, where the batch of all devices is given
):
    """Translate config files of other trainers to recipes, and list what has no counterpart."""
    target = Path(out)
    if num_devices < 1:
        raise ConfigError(f"--num-devices {num_devices} must be 1 or more")
    if target.exists():
        raise ConfigError(f"--out {target} is there already; name another file, or remove it")
    found = translate_file(Path(file), num_devices, str(target.with_suffix("")))
    settings = {key: Setting(value, f"was {key_there}") for key, (value, key_there) in sorted(found.settings.items())}
    for name, text in found.files.items():
        write_text(Path(name), text)
    write_text(target, f"# Made from {file}, a config of {found.system}.\n" + write_settings(settings, origins=True))
    lines = [f"{target}: {len(settings)} settings", *(f"beside it: {name}" for name in found.files)]
    lines += ["without a counterpart, or by hand:"] if found.left_out else []
    lines += [f"  {key}: {reason}" for key, reason in found.left_out.items()]
    sys.stdout.write("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Source:
    """A file to translate. `values`: by key, resolved; `num_devices`: that it is to train on; `stem`: of what is
    written beside the recipe; `files`: those, text by name."""

    values: dict[str, object]
    num_devices: int
    stem: str
    files: dict[str, str] = field(default_factory=dict)

    def first(self, *keys: str, default=None):
        """The value of the first key that is there."""
        return next((self.values[key] for key in keys if key in self.values), default)


@dataclass(frozen=True)
class Counterpart:
    """What means the same here. `note`: for readers, and why there is nothing where there are no `keys`. `make`: one of
    `_MAKERS`; else the value is taken as it is. A `???` stays one, unless `make` takes `any_value`."""

    keys: tuple[str, ...] = ()
    note: str = ""
    make: Callable[[Any, Source], Any] = lambda value, _source: value
    any_value: bool = False

    def translate(self, value, source: Source) -> dict[str, object]:
        """Our settings by key. Raises NoCounterpart."""
        if not self.keys:
            raise NoCounterpart(self.note)
        if value == "???" and not self.any_value:
            return dict.fromkeys(self.keys[:1], "???")
        found = self.make(value, source)
        if isinstance(found, dict):
            return found
        return dict(zip(self.keys, found if isinstance(found, tuple) else (found,), strict=False))


@dataclass(frozen=True)
class Translation:
    """A recipe's settings by key, each with the key that it was, and the keys without counterpart with the reason, or
    with what else to do."""

    system: str
    settings: dict[str, tuple[object, str]]
    left_out: dict[str, str]
    files: dict[str, str]


def translate_file(path: Path, num_devices: int, stem: str) -> Translation:
    """Translate a config file of one of `SYSTEMS`. Raises ConfigError for a file of neither."""
    written = _resolved(read_yaml(path)[0], path)
    system = max(SYSTEMS, key=lambda name: len(_flatten(written, SYSTEMS[name]).keys() & SYSTEMS[name].keys()))
    table = SYSTEMS[system]
    source = Source(_flatten(written, table), num_devices, stem)
    if not source.values.keys() & table.keys():
        raise ConfigError(f"{path} is not a config of {' or '.join(SYSTEMS)}: no key of it is one of theirs")
    settings, left_out = {key: (value, f"{system}'s default") for key, value in UNSAID[system].items()}, {}
    for key, value in source.values.items():
        if key not in table:
            left_out[key] = f"{system} has no such key; {did_you_mean(key, table)}"
            continue
        try:
            settings |= {ours: (one, key) for ours, one in table[key].translate(value, source).items()}
        except NoCounterpart as reason:
            left_out[key] = str(reason)
            settings |= dict.fromkeys(table[key].keys[:1], ("???", key))  # there is a key, but not for this value
        if key in ("experiment.project", "wandb_project") and value not in (None, "???"):
            left_out[key] = f"for wandb, export WANDB_PROJECT={shlex.quote(str(value))}"
    return Translation(system, settings, left_out, source.files)


def _resolved(values: dict[str, object], path: Path) -> dict:
    """The file as a tree, references followed; what refers to a `???` is one itself."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    tree = tree_of(values)
    config = OmegaConf.create(tree)

    def resolve(value, key: str):
        if isinstance(value, dict):
            return {name: resolve(one, f"{key}.{name}" if key else name) for name, one in value.items()}
        if not (isinstance(value, str) and "${" in value):
            return value
        try:
            return OmegaConf.select(config, key)
        except InterpolationToMissingValueError:
            return "???"
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path}: {key} {value} cannot be resolved: {str(error).splitlines()[0]}") from error

    return resolve(tree, "")


def _flatten(tree: dict, table: dict, above: str = "") -> dict[str, object]:
    """Values by dotted key; a mapping that the table knows as one value stays whole."""
    found = {}
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and key not in table:
            found |= _flatten(value, table, f"{key}.")
        else:
            found[key] = value
    return found


def _parts(_value, source: Source) -> str:
    """A filelist and the list of it that says its format, from the keys of theirs that say something of it."""
    value = source.first("dataset.params.path", "webdataset_path", default="???")
    classes = source.first("dataset.params.idx_to_prompt", "dataset.params.class_mapping")
    if "???" in (value, classes):
        return "???"
    places = _listed(value)
    endings = {suffix: format for format, suffix in _SUFFIXES.items()}
    said = _FORMATS.get(str(source.first("dataset.type")), "webdataset")
    format = endings.get(places[-1].rpartition(".")[2], said)
    name, options = f"{source.stem}.filelist", f"format={format}"
    lines = [f"{place_of(one, format)}\n" for one in places]
    if isinstance(classes, dict):
        source.files[f"{source.stem}.classes.json"] = json.dumps(classes, indent=2, ensure_ascii=False) + "\n"
        classes = f"{source.stem}.classes.json"
    if classes:
        options += f" idx_to_prompt={Path(classes).absolute()}"
        if len(options.split()) > 2:
            raise NoCounterpart(f"{classes}: a list of filelists takes no path with a space in it; move the file")
    source.files[name], source.files[f"{name}.list"] = "".join(lines), f"{Path(name).name} {options}\n"
    return f"{name}.list"


def _listed(value) -> list[str]:
    """Places; of a YAML file those that it lists, as Stable Cascade's trainer reads one."""
    if str(value).strip().endswith((".yml", ".yaml")):
        try:
            value = yaml.safe_load(read_given_text(value.strip()))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise NoCounterpart(f"{value} cannot be read ({error}); it should list paths") from error
    if not value or not isinstance(value, str | list):
        raise NoCounterpart(f"{value} names no paths; write them")
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def _format(value, _source: Source) -> dict:
    if value not in _FORMATS:
        raise NoCounterpart(f"the data set {value} is not known; there are {', '.join(_FORMATS)}")
    return {}  # `_parts` has it


def _schedule(value, _source: Source) -> str:
    known = {"ConstantWithWarmup": "constant_with_warmup", "CosineWithWarmup": "cosine"}
    if value not in known:
        raise NoCounterpart(f"the schedule {value} is not built here; there are {', '.join(known)}")
    return known[value]


def _optimizer(value, _source: Source) -> str:
    if (name := str(value).lower()) not in OPTIMIZERS:
        raise NoCounterpart(f"the optimizer {value} is not built here; there are {', '.join(OPTIMIZERS)}")
    return name


def _precision(value, _source: Source) -> dict:
    names = {"bf16": {"compute.bf16": True}, "fp16": {"compute.fp16": True}, "no": {"compute.bf16": False}}
    names |= {"bfloat16": names["bf16"], "float16": names["fp16"], "float32": names["no"], "fp32": names["no"]}
    if str(value) not in names:
        raise NoCounterpart(f"{value} is not a precision that is built here: bf16, fp16, float32")
    return names[str(value)]


def _folder(*keys: str):
    def make(_value, source: Source) -> str:
        names = [str(source.values[key]) for key in keys if source.values.get(key) is not None]
        return "???" if "???" in names else "/".join(names)

    return make


def _unet(value, source: Source) -> str:
    name = f"{source.stem}.unet.json"
    source.files[name] = json.dumps(value, indent=2) + "\n"
    return name


def _noise_schedule(value, _source: Source) -> tuple:
    """What is predicted, the betas and whether they end in pure noise, of settings as diffusers has them."""
    settings = value
    if not isinstance(value, dict):
        places = [Path(str(value), folder, "scheduler_config.json") for folder in ("", "scheduler")]
        path = next((one for one in places if one.is_file()), None)
        if path is None:
            raise NoCounterpart(
                f"no scheduler_config.json is in {value} here, so it was not read: say whether the model predicts "
                "epsilon or v_prediction; betas are the published ones unless model.beta_schedule says otherwise"
            )
        settings = read_json_object(path, ConfigError)
    settings = _DDPM | settings
    if other := {key: settings[key] for key, value in _BETAS.items() if settings[key] != value}:
        raise NoCounterpart(f"only the published betas are trained with, and this schedule has {other}")
    return tuple(settings[key] for key in ("prediction_type", "beta_schedule", "rescale_betas_zero_snr"))


def _share_of_batch(value, source: Source) -> int:
    parts = source.num_devices * int(source.first("grad_accum_steps", default=1))
    if not isinstance(value, int) or value % parts:
        raise NoCounterpart(f"{value} samples cannot be shared by {parts} batches; name --num-devices")
    return value // parts


_PUBLISHED = "stabilityai/stable-cascade"
# By their model_version: what is trained, and its name as a published model.
_STAGES = {
    "3.6B": ("prior", f"{_PUBLISHED}-prior"), "1B": ("prior", f"{_PUBLISHED}-prior/prior_lite"),
    "3B": ("decoder", _PUBLISHED), "700M": ("decoder", f"{_PUBLISHED}/decoder_lite"),
}  # fmt: skip


def _stage(_value, source: Source) -> dict:
    """Of either of the two keys that say it: a checkpoint goes before the published model."""
    version = str(source.first("model_version"))
    if version not in _STAGES:
        raise NoCounterpart(f"model_version {version} is not built here; there are {', '.join(_STAGES)}")
    name, published = _STAGES[version]
    controlled = name == "prior" and source.first("controlnet_filter", "controlnet_blocks") is not None
    found = {"family": f"cascade_{'controlnet' if controlled else name}"}
    found |= {"model.text_encoder_name_or_path": f"{_PUBLISHED}-prior"}
    found |= {"model.image_encoder_name_or_path": f"{_PUBLISHED}-prior"} if name == "prior" else {}
    found |= {"model.vqgan_name_or_path": _PUBLISHED} if name == "decoder" else {}
    return found | {f"model.{name}_name_or_path": source.first("generator_checkpoint_path") or published}


# By the name that foreign.yaml has for it: (value, Source) -> the value of the one key, a tuple of those of all, or
# values by key where not all keys are meant.
_MAKERS: dict[str, Callable[[Any, Source], Any]] = {
    "adaptive": lambda value, _: "adaptive" if value else "p2",
    "attention": lambda value, _: [one.replace(".attn", "attention") for one in value],
    "average": lambda value, _: (value, 0.995) if value else value,
    "bottleneck": lambda value, _: value or "effnet",
    "both": lambda value, _: (value, value),
    "cascade folder": _folder("checkpoint_path", "experiment_id"),
    "eight bits": lambda value, _: "adamw8bit" if value else "adamw",
    "filter": lambda _, source: control_filter(source.values),
    "filters": lambda value, _: json.dumps(value, ensure_ascii=False),
    "format": _format,
    "learning rate": lambda value, source: source.first("lr_scheduler.params.learning_rate", default=value),
    "newest": lambda value, _: 1 if value else None,
    "noise schedule": _noise_schedule,
    "optimizer": _optimizer,
    "parts": _parts,
    "precision": _precision,
    "prompts": lambda value, source: ([value], source.first("experiment.save_every", default=1000)),
    "rank": lambda value, _: (value, 1),
    "random ratio": lambda value, source: value if source.first("multi_aspect_ratio") else {},
    "ratios": lambda value, source: (
        *("ratios", [str(ratio) for ratio in value], True, False),
        source.first("bucketeer_random_ratio", default=0.05),
    ),
    "reporters": lambda *_: ["visualdl", "wandb"],
    "run folder": _folder("experiment.log_dir", "experiment.project", "experiment.name"),
    "schedule": _schedule,
    "share of batch": _share_of_batch,
    "sharding": lambda value, _: "stage2" if value else "",
    "stage": _stage,
    "tokens": lambda value, _: [token if start is None else f"{token}={start}" for token, start in value],
    "unet": _unet,
    "warmup": lambda value, _: (value, "constant_with_warmup"),
}


def _read_table(made: dict, same: dict, none: dict) -> dict[str, Counterpart]:
    """A system's table in foreign.yaml."""
    found = {key: Counterpart(tuple(here), note, _MAKERS[by], *more) for key, (by, here, note, *more) in made.items()}
    for key, stated in same.items():
        here, *note = [stated] if isinstance(stated, str) else stated
        found[key] = Counterpart((here,), *note)
    return found | {key: Counterpart(note=reason) for key, reason in none.items()}


_TABLES = yaml.safe_load(Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8"))
UNSAID = {system: table.pop("unsaid") for system, table in _TABLES.items()}
SYSTEMS = {system: _read_table(**table) for system, table in _TABLES.items()}
