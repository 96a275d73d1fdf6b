"""One YAML file of settings: values by key, and the line on which each key stands.

There are two levels: plain keys (`family: ldm`) and sections of settings (`data:` with `resolution: 256` below it). A
setting's key is `section.name`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from ..utils.errors import ConfigError, describe
from ..utils.files import read_given_text

# Bytes of a file's name that are not UTF-8 are lone surrogates in Python, which YAML does not take: characters of a
# private plane stand for them there.
_TO_YAML = {0xDC00 + byte: 0x10FE00 + byte for byte in range(0x80, 0x100)}
_FROM_YAML = {there: here for here, there in _TO_YAML.items()}


def for_yaml(value, back: bool = False):
    """A value, or a list or mapping of them, as YAML takes it; `back`: the inverse."""
    if isinstance(value, list | tuple):
        return [for_yaml(one, back) for one in value]
    if isinstance(value, dict):
        return {name: for_yaml(one, back) for name, one in value.items()}
    return value.translate(_FROM_YAML if back else _TO_YAML) if isinstance(value, str) else value


# What is raised for what is no value of its kind (`!!int x`), nested too deeply, or a number of thousands of digits.
OUT_OF_BOUNDS = (ValueError, KeyError, AttributeError, TypeError, RecursionError)


def readable(found):
    """`for_yaml(found, back=True)`. Raises one of OUT_OF_BOUNDS for a number that cannot be written again."""
    str(found)
    return for_yaml(found, back=True)


@dataclass(frozen=True)
class YamlFile:
    """What a file holds, unresolved: `values` and `lines` (from 1) by key. An empty section is a plain key of None."""

    values: dict[str, object]
    lines: dict[str, int] = field(default_factory=dict)


def read_yaml(path: Path) -> YamlFile:
    """Read a file. Raises ConfigError with file, line and reason for what is not a YAML mapping of text keys."""
    try:
        text = read_given_text(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); name a YAML file") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> YamlFile:
    """The same of a text; `name` stands for it in errors."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{name} holds no settings; write lines such as `name: value`")
        found = OmegaConf.to_container(OmegaConf.create(text))  # refuses duplicate keys and endless aliases
        values = readable(found)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not YAML: {error.problem}; correct that line") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:  # a key that is not text, or `${` without `}`
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{name}: {f'{key}: ' if key else ''}{str(error).splitlines()[0]}; correct it") from error
    except OUT_OF_BOUNDS as error:
        raise ConfigError(f"{name}: not YAML that can be read: {describe(error)}; correct it") from error
    return YamlFile(*_flatten(root, values, name))


def _flatten(root, values: dict, name: str) -> tuple[dict, dict]:
    found, lines = {}, {}
    for key_node, node in root.value:
        line, key = key_node.start_mark.line + 1, key_node.value
        if key not in values:
            raise ConfigError(f"{name}:{line}: the key {key} is not text; put it in quotes, or correct it")
        if "." in key:
            section, _, inner = key.partition(".")
            raise ConfigError(f"{name}:{line}: {key} is written in two lines: `{section}:`, and below it `{inner}:`")
        value = values[key]
        if not isinstance(value, dict) or not value:
            found[key], lines[key] = None if value == {} else value, line
            continue
        below = {one.value: one.start_mark.line + 1 for one, _ in node.value}
        for inner, one in value.items():
            found[f"{key}.{inner}"] = one
            lines[f"{key}.{inner}"] = below.get(inner, line)
    return found, lines
