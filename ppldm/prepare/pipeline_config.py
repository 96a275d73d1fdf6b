"""The file of `ppldm pipeline`: which stages there are, and that every setting is a flag of its stage.

out: laion_art                 # folder of everything; relative paths are taken from the folder of this file
metadata: laion-art.parquet    # parquet files, or folders of them: one, or a list
whole_rows: 1372052778         # rows of the whole data set that this is a sample of; for the projection alone
filter: {preset: laion-art}    # flags of `ppldm filter`; without this line nothing is filtered
download: {image_size: 512}    # flags of `ppldm download`
annotate: {}                   # without this line no CSV files are written
convert: {}                    # flags of `ppldm convert`
"""

import difflib
import inspect
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, get_args, get_origin

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
_KEYS = ("out", "metadata", "whole_rows", *STAGES)
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


def read_config(path) -> PipelineConfig:
    """Read and check the file. Raises ConfigError with the key, the value and what could be there."""
    import yaml

    path = Path(path)
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} ({getattr(error, 'strerror', error)}); name a YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings; it should have lines such as `out: my_data`")
    for key in settings:
        if key not in _KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}; {_suggest(str(key), _KEYS)}")
    metadata = settings.get("metadata")
    metadata = [metadata] if isinstance(metadata, str) else metadata
    if not isinstance(settings.get("out"), str):
        raise ConfigError(f"{path}: `out` is missing; name a folder for everything that is made")
    if not metadata or not isinstance(metadata, list) or not all(isinstance(one, str) for one in metadata):
        raise ConfigError(f"{path}: `metadata` is missing; name parquet files, or folders of them")
    if len(metadata) > 1 and "filter" not in settings:
        raise ConfigError(f"{path}: several `metadata` need a `filter` to make them one; `filter: {{}}` keeps all rows")
    whole_rows = settings.get("whole_rows")
    if whole_rows is not None and (not isinstance(whole_rows, int) or whole_rows < 1):
        raise ConfigError(f"{path}: `whole_rows` is {whole_rows!r}; it must be a number of rows")
    resolved = tuple((path.parent / local_path(one)).absolute() for one in metadata)
    missing = [str(one) for one in resolved if not one.exists()]
    if missing:
        raise ConfigError(f"{path}: `metadata` {missing[0]} does not exist")
    stages = {
        name: _check_stage(path, name, settings.get(name)) for name in STAGES if name in settings or name in _ALWAYS
    }
    return PipelineConfig((path.parent / local_path(settings["out"])).absolute(), resolved, whole_rows, stages)


def _check_stage(path: Path, stage: str, settings: dict | None) -> dict:
    """The arguments of a stage, hyphens as underscores."""
    settings = {} if settings is None or settings is True else settings
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: `{stage}` is {settings!r}; it should hold flags of `ppldm {stage}`, or be {{}}")
    parameters = inspect.signature(load_stage(stage)).parameters
    known = {name: parameter for name, parameter in parameters.items() if name not in _OWN}
    arguments = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: {stage} has no setting {key!r}; {_suggest(name, known)}")
        kind = known[name].annotation
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{path}: {stage}.{key} is {value!r}; it must be of type {kind.__name__}")
        arguments[name] = value
    return arguments


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


def _suggest(word: str, known) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
