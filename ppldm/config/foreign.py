"""Config files of open-diffusion and of Stable Cascade's training, translated to recipes.

A table for each says what becomes of every key that it knows: the settings here that mean the same, or why there are
none; the plain ones of them stand in foreign.yaml. The site shows these tables.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import yaml

from ..utils.errors import ConfigError
from ..utils.store.client import check_address, is_address
from ..utils.text import did_you_mean
from .yaml_file import read_yaml

_PLAIN = Path(__file__).with_name("foreign.yaml")
_MOST_PARTS = 1_000_000
_PIPE = re.compile(r"pipe: *(?:aws s3 cp|gsutil (?:cp|cat)|curl(?: -\S+)*|hdfs dfs -cat) +(?P<address>\S+)(?: +-)?")

# By the class of a filter of control images: ours, and of its parameters the names here.
_FILTERS = {
    "CannyFilter": ("canny", {"resize": ("resize",)}),
    **dict.fromkeys(("SRFilter", "SREffnetFilter"), ("super-resolution", {"scale_factor": ("scale",)})),
    "InpaintFilter": (
        "inpainting", {"thresold": ("threshold_low", "threshold_high"), "p_outpaint": ("p_outpaint",)}
    ),
}  # fmt: skip


class NoCounterpart(Exception):
    """A value that cannot be translated; its text is the reason."""


def expand_braces(text: str) -> list[str]:
    """The paths of a pattern such as a/{000..012}.tar, as WebDataset writes them, and of {a,b}."""
    found = re.search(r"\{([^{}]*)\}", text)
    if not found:
        return [text]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found.group(1))
    if span:
        first, last = span.groups()
        if int(last) - int(first) >= _MOST_PARTS:
            raise NoCounterpart(f"{text} names more than {_MOST_PARTS:,} files; write the filelist yourself")
        middle = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    else:
        middle = found.group(1).split(",")
    head, tail = text[: found.start()], text[found.end() :]
    return [f"{head}{one}{rest}" for one in middle for rest in expand_braces(tail)]


def places_of(text: str) -> list[str]:
    """The lines of a filelist that mean the same. A pipe whose command only copies an address is that address; a folder
    of a store is the tar files below it."""
    copied = _PIPE.fullmatch(text.strip())
    place = copied["address"] if copied else text
    if is_address(place):
        return [check_address(one if "." in one.rpartition("/")[2] else f"{one.rstrip('/')}/**/*.tar")
                for one in expand_braces(place)]  # fmt: skip
    if place.startswith("pipe:") or "://" in place.replace("file://", ""):
        raise NoCounterpart(f"{place} cannot be read here: mount it or copy it, and write a filelist of the parts")
    return [str(Path(one).absolute()) for one in expand_braces(re.sub("^file:(//)?", "", place))]


def control_filter(config: dict) -> str:
    """What `--control` means the same as the filter in a config of Stable Cascade's trainer. Raises NoCounterpart."""
    name, given = config.get("controlnet_filter"), config.get("controlnet_filter_params") or {}
    ours, names = _FILTERS.get(name, (None, {}))
    if ours is None or given.keys() - names.keys():
        shown = ", ".join([str(name), *sorted(given.keys() - names.keys())])
        raise NoCounterpart(f"{shown} is not a filter here; make one of your own: model.control package.module:Class")
    values = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
    pairs = [pair for key in given for pair in zip(names[key], values[key], strict=False)]
    return ",".join([ours, *(f"{key}={value}" for key, value in pairs)])


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
    """What means the same here. `keys` as documented; `make`: (value, Source) -> values by key; `note`: for readers.

    Without `make` the value is taken as it is; without `keys` there is no counterpart, and the note says why. A `???`
    stays one, unless `make` takes `any_value`.
    """

    keys: tuple[str, ...] = ()
    note: str = ""
    make: Callable[[object, Source], dict] | None = None
    any_value: bool = False

    def translate(self, value, source: Source) -> dict[str, object]:
        """Our settings by key. Raises NoCounterpart."""
        if not self.keys:
            raise NoCounterpart(self.note)
        if value == "???" and not self.any_value:
            return dict.fromkeys(self.keys[:1], "???")
        return self.make(value, source) if self.make else {self.keys[0]: value}


@dataclass(frozen=True)
class Translation:
    """A recipe's settings by key, each with the key that it was, and the keys without counterpart with the reason."""

    system: str
    settings: dict[str, tuple[object, str]]
    left_out: dict[str, str]
    files: dict[str, str]


def translate_file(path: Path, num_devices: int, stem: str) -> Translation:
    """Translate a config file of one of `SYSTEMS`. Raises ConfigError for a file of neither."""
    written = _resolved(read_yaml(path).values, path)
    system = max(SYSTEMS, key=lambda name: len(_flatten(written, SYSTEMS[name]).keys() & SYSTEMS[name].keys()))
    table = SYSTEMS[system]
    source = Source(_flatten(written, table), num_devices, stem)
    if not source.values.keys() & table.keys():
        raise ConfigError(f"{path} is not a config of {' or '.join(SYSTEMS)}: no key of it is one of theirs")
    settings, left_out = {key: (value, system) for key, value in _FAMILIES.get(system, {}).items()}, {}
    for key, value in source.values.items():
        if key not in table:
            left_out[key] = f"{system} has no such key; {did_you_mean(key, table)}"
            continue
        try:
            settings |= {ours: (one, key) for ours, one in table[key].translate(value, source).items()}
        except NoCounterpart as reason:
            left_out[key] = str(reason)
            settings |= dict.fromkeys(table[key].keys[:1], ("???", key))  # there is a key, but not for this value
    return Translation(system, settings, left_out, source.files)


def _resolved(values: dict[str, object], path: Path) -> dict:
    """The file as a tree, references followed; what refers to a `???` is one itself."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    tree = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
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


def _parts(value, source: Source) -> dict:
    places = chain.from_iterable(map(places_of, map(str, value if isinstance(value, list) else [value])))
    name = f"{source.stem}.filelist"
    source.files[name] = "".join(f"{place}\n" for place in places)
    return {"data.file_list": name}


def _choose(key: str, known: dict, word: str):
    def make(value, _source: Source) -> dict:
        if value not in known:
            raise NoCounterpart(f"{word} {value} is not built here; there are {', '.join(map(str, known))}")
        return {key: known[value]}

    return make


def _precision(value, _source: Source) -> dict:
    names = {"bf16": {"compute.bf16": True}, "fp16": {"compute.fp16": True}, "no": {"compute.bf16": False}}
    names |= {"bfloat16": names["bf16"], "float16": names["fp16"], "float32": names["no"], "fp32": names["no"]}
    if str(value) not in names:
        raise NoCounterpart(f"{value} is not a precision that is built here: bf16, fp16, float32")
    return names[str(value)]


def _folder(*keys: str):
    def make(_value, source: Source) -> dict:
        names = [str(source.values[key]) for key in keys if source.values.get(key) is not None]
        return {"run.output_dir": "???" if "???" in names else "/".join(names)}

    return make


def _unet(value, source: Source) -> dict:
    name = f"{source.stem}.unet.json"
    source.files[name] = json.dumps(value, indent=2) + "\n"
    return {"model.unet_config_file": name}


def _share_of_batch(value, source: Source) -> dict:
    parts = source.num_devices * int(source.first("grad_accum_steps", default=1))
    if not isinstance(value, int) or value % parts:
        raise NoCounterpart(f"{value} samples cannot be shared by {parts} batches; name --num-devices")
    return {"run.per_device_train_batch_size": value // parts}


def _filters(value, _source: Source) -> dict:
    return {"data.where": json.dumps(value, ensure_ascii=False)}


_WANDB = Counterpart(
    ("logging.report_to",), "and export WANDB_API_KEY: a secret stands in no file here",
    lambda _value, _source: {"logging.report_to": ["visualdl", "wandb"]}, any_value=True,
)  # fmt: skip
_RATE = Counterpart(
    ("optimizer.learning_rate",), "the schedule's, where both are given",
    lambda value, source: {
        "optimizer.learning_rate": source.first("lr_scheduler.params.learning_rate", default=value)
    },
)  # fmt: skip
_RUN_FOLDER = ("experiment.log_dir", "experiment.project", "experiment.name")
_RUN_DIR = Counterpart(("run.output_dir",), "log_dir/project/name", _folder(*_RUN_FOLDER))

_OPEN_DIFFUSION = {
    "wandb.api_key": _WANDB,
    **dict.fromkeys(_RUN_FOLDER, _RUN_DIR),
    "experiment.save_only_most_recent": Counterpart(
        ("run.save_total_limit",), "true: 1, false: all",
        lambda value, _source: {"run.save_total_limit": 1 if value else None},
    ),
    "optimizer.params.learning_rate": _RATE,
    "model.unet.params": Counterpart(("model.unet_config_file",), "written to a JSON file beside the recipe", _unet),
    "model.use_ema": Counterpart(
        ("optimizer.use_ema", "optimizer.ema_decay"), "with their decay, 0.995",
        lambda value, _source: {"optimizer.use_ema": value} | ({"optimizer.ema_decay": 0.995} if value else {}),
    ),
    "model.mixed_precision": Counterpart(("compute.bf16", "compute.fp16"), "", _precision),
    "dataset.params.path": Counterpart(
        ("data.file_list",), "paths and addresses; braces are written out into a filelist beside the recipe", _parts
    ),
    "dataset.params.filters": Counterpart(("data.where",), "as it is", _filters),
    "lr_scheduler.scheduler": Counterpart(
        ("optimizer.lr_scheduler_type",), "constant_with_warmup, cosine",
        _choose(
            "optimizer.lr_scheduler_type",
            {"ConstantWithWarmup": "constant_with_warmup", "CosineWithWarmup": "cosine"}, "the schedule",
        ),
    ),
    "lr_scheduler.params.learning_rate": _RATE,
}  # fmt: skip

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
    found |= {"model.vqgan_name_or_path": _PUBLISHED} if name == "decoder" else {}
    chosen = source.first("generator_checkpoint_path") or published
    return found | {f"model.{name}_name_or_path": chosen}


def _tokens(value, _source: Source) -> dict:
    words = [token if start is None else f"{token}={start}" for token, start in value]
    return {"model.train_tokens": words}


_STAGE = Counterpart(
    ("model.prior_name_or_path", "model.decoder_name_or_path"), "with its family and the networks beside it", _stage
)
_FILTER = Counterpart(
    ("model.control",), "canny, super-resolution, inpainting, with their parameters",
    lambda _value, source: {"model.control": control_filter(source.values)},
)  # fmt: skip
_CASCADE_DIR = Counterpart(
    ("run.output_dir",), "checkpoint_path/experiment_id", _folder("checkpoint_path", "experiment_id")
)

_STABLE_CASCADE = {
    "experiment_id": _CASCADE_DIR,
    "checkpoint_path": _CASCADE_DIR,
    "model_version": _STAGE,
    "generator_checkpoint_path": _STAGE,
    "wandb_project": Counterpart(
        _WANDB.keys, "the project is called ppldm, the run as its folder; export WANDB_API_KEY", _WANDB.make, True
    ),
    "batch_size": Counterpart(
        ("run.per_device_train_batch_size",), "theirs is of all devices: divided by --num-devices and accumulation",
        _share_of_batch,
    ),
    "multi_aspect_ratio": Counterpart(
        ("data.buckets", "data.bucket_ratios"), "buckets of ratios",
        lambda value, _source: {"data.buckets": "ratios", "data.bucket_ratios": [str(ratio) for ratio in value]},
    ),
    "save_every": Counterpart(
        ("run.save_steps", "validation.image_logging_steps"), "both: they save and draw at once",
        lambda value, _source: {"run.save_steps": value, "validation.image_logging_steps": value},
    ),
    "warmup_updates": Counterpart(
        ("optimizer.warmup_steps", "optimizer.lr_scheduler_type"), "with constant_with_warmup",
        lambda value, _source: {
            "optimizer.warmup_steps": value, "optimizer.lr_scheduler_type": "constant_with_warmup"
        },
    ),
    "use_fsdp": Counterpart(
        ("compute.sharding",), "true: stage2",
        lambda value, _source: {"compute.sharding": "stage2" if value else ""},
    ),
    "dtype": Counterpart(("compute.bf16", "compute.fp16"), "", _precision),
    "webdataset_path": Counterpart(("data.file_list",), "paths, addresses: into a filelist beside the recipe", _parts),
    "dataset_filters": Counterpart(("data.where",), "as it is; a lambda may only compare", _filters),
    "adaptive_loss_weight": Counterpart(
        ("model.loss_weighting",), "true: adaptive; false: p2",
        lambda value, _source: {"model.loss_weighting": "adaptive" if value else "p2"},
    ),
    "controlnet_filter": _FILTER,
    "controlnet_filter_params": _FILTER,
    "controlnet_bottleneck_mode": Counterpart(
        ("model.controlnet_bottleneck",), "", lambda value, _source: {"model.controlnet_bottleneck": value or "effnet"}
    ),
    "module_filters": Counterpart(
        ("model.lora_modules",), "'.attn', one layer there, is attention",
        lambda value, _source: {"model.lora_modules": [one.replace(".attn", "attention") for one in value]},
    ),
    "rank": Counterpart(
        ("model.lora_rank", "model.lora_alpha"), "theirs are scaled by 1 over it",
        lambda value, _source: {"model.lora_rank": value, "model.lora_alpha": 1},
    ),
    "train_tokens": Counterpart(("model.train_tokens",), "as token=expression", _tokens),
}  # fmt: skip

_FAMILIES = {"open-diffusion": {"family": "stable_diffusion"}}


def _with_plain(system: str, made: dict[str, Counterpart]) -> dict[str, Counterpart]:
    """A system's whole table: what is made, and what foreign.yaml says."""
    plain = yaml.safe_load(_PLAIN.read_text(encoding="utf-8"))[system]
    same = {key: [one] if isinstance(one, str) else one for key, one in plain["same"].items()}
    return (
        made
        | {key: Counterpart((ours,), *note) for key, (ours, *note) in same.items()}
        | {key: Counterpart(note=reason) for key, reason in plain["none"].items()}
    )


SYSTEMS = {
    "open-diffusion": _with_plain("open-diffusion", _OPEN_DIFFUSION),
    "Stable Cascade": _with_plain("Stable Cascade", _STABLE_CASCADE),
}
