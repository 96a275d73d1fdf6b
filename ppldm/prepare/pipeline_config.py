"""The file of `ppldm pipeline`: which stages there are, and that every setting is a flag of its stage.

out: laion_art                 # folder of everything; relative paths are taken from the folder of this file
metadata: laion-art.parquet    # parquet files, or folders of them: one, or a list
whole_rows: 1372052778         # rows of the whole data set that this is a sample of; for the projection alone
filter: {preset: laion-art}    # flags of `ppldm filter`; without this line nothing is filtered
download: {image_size: 512}    # flags of `ppldm download`
annotate: {}                   # without this line no CSV files are written
convert: {}                    # flags of `ppldm convert`
"""

import inspect
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, get_args, get_origin

from ..config.load import Layer, file_layers, load, override_layer
from ..config.option import REQUIRED, Bounds, Option
from ..utils.errors import ConfigError
from ..utils.files import local_path

# Stage -> the module of its command, in the order in which they run.
STAGES = {
    "filter": ".filter.filter",
    "download": ".download.download",
    "annotate": ".convert.annotate",
    "convert": ".convert.convert",
}
_ALWAYS = ("download", "convert")
# Arguments that the pipeline gives itself, or that make a command do something else.
_OWN = {"input", "output", "metadata", "out", "folder", "json", "dry_run", "check", "redo", "retry_failed", "only"}


@dataclass(frozen=True)
class PipelineConfig:
    """Absolute paths; of each stage that is to run, its arguments by name."""

    out: Path
    metadata: tuple[Path, ...]
    whole_rows: int | None
    stages: dict[str, dict]


def load_stage(name: str):
    """The function behind the command `ppldm name`."""
    return getattr(import_module(STAGES[name], __package__), name)


def read_config(path, overrides: list[str] = ()) -> PipelineConfig:
    """Read and check the file. Raises ConfigError with the line, the key, the value and what could be there."""
    schema = _schema()
    layers = [_as_written(layer) for layer in [*file_layers(path), override_layer(overrides, schema)]]
    found = load(layers, schema, {key: stated.default for key, stated in schema.items()})
    settings = {key: one.value for key, one in found.items() if one.origin != "default"}
    metadata = settings["metadata"]
    given = {key.partition(".")[0] for layer in layers for key in layer.values}
    if not metadata:
        raise ConfigError(f"{path}: metadata names nothing; name parquet files, or folders of them")
    if len(metadata) > 1 and "filter" not in given:
        raise ConfigError(f"{path}: several `metadata` need a `filter` to make them one; `filter: {{}}` keeps all rows")
    folder = Path(path).parent
    resolved = tuple((folder / local_path(one)).absolute() for one in metadata)
    missing = [str(one) for one in resolved if not one.exists()]
    if missing:
        raise ConfigError(f"{path}: `metadata` {missing[0]} does not exist")
    stages = {
        stage: {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{stage}.")}
        for stage in STAGES
        if stage in given or stage in _ALWAYS
    }
    out = (folder / local_path(settings["out"])).absolute()
    return PipelineConfig(out, resolved, settings.get("whole_rows"), stages)


def _schema() -> dict[str, Option]:
    """The options of the file by key: its own, and the flags of each stage."""
    found = {
        "out": _stated("out", str, REQUIRED),
        "metadata": _stated("metadata", str, REQUIRED, is_list=True),
        "whole_rows": _stated("whole_rows", int, None, bounds=Bounds(least=1)),
    }
    for stage in STAGES:
        for name, parameter in inspect.signature(load_stage(stage)).parameters.items():
            kind = parameter.annotation
            if name not in _OWN:
                kind, facts = get_args(kind) if get_origin(kind) is Annotated else (kind, {})
                choices, is_list = tuple(facts.get("choices", ())), facts.get("nargs") == "+"
                found[f"{stage}.{name}"] = _stated(
                    name, kind, parameter.default, section=stage, choices=choices, is_list=is_list
                )
    return found


def _stated(name: str, kind: type, default, **facts) -> Option:
    return Option("", default, default, name=name, type=kind, may_be_none=default is None, **facts)


def _as_written(layer: Layer) -> Layer:
    """A layer with hyphens as underscores, one metadata as a list of it, and `stage: true` as a stage without flags."""
    values = {key.replace("-", "_"): value for key, value in layer.values.items()}
    values |= {stage: None for stage in STAGES if values.get(stage) is True}
    if isinstance(metadata := values.get("metadata"), str) and metadata != "???":
        values["metadata"] = [metadata]
    return replace(layer, values=values, lines={key.replace("-", "_"): line for key, line in layer.lines.items()})


def command_words(stage: str, arguments: dict) -> list[str]:
    """The command line of a stage as words, which `shlex.join` makes one that can be pasted."""
    parameters = inspect.signature(load_stage(stage)).parameters
    places, flags = [], []
    for name, value in arguments.items():
        kind = parameters[name].annotation
        facts = get_args(kind)[1] if get_origin(kind) is Annotated else {}
        values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        flag = f"--{name.replace('_', '-')}"
        if parameters[name].default is inspect.Parameter.empty and not facts.get("opt"):
            places += values
        elif isinstance(value, bool):
            is_default = value == parameters[name].default
            flags += [] if is_default else [flag if value else f"--no-{flag[2:]}"]
        elif len(values) == 1:
            flags.append(f"{flag}={values[0]}" if values[0].startswith("-") or not values[0] else flag)
            flags += [] if "=" in flags[-1] else values
        else:
            flags += [flag, *values]
    return ["ppldm", stage, *places, *flags]
