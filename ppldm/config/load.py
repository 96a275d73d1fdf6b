"""Settings from YAML files, overrides and flags: merged by strength, resolved, checked, each with its origin.

Strength, the strongest first: flags, overrides (`data.resolution=512`), the file, what it builds on (`base:`), the
preset, defaults. `???` is a value that must be given, `${data.resolution}` that of another key, `${oc.env:NAME}` and
`${oc.env:NAME,default}` that of an environment variable. What a flag says is taken as it is.

A schema is the options by key, such as data.resolution; plain keys have no section. Nothing here knows what the
settings are for.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..utils.errors import ConfigError, describe
from ..utils.files import read_given_text
from ..utils.text import did_you_mean, nearest, note_hidden
from ..utils.variables import read
from .option import REQUIRED, Option, Schema, check_value

PRESETS_DIR = Path(__file__).parent / "presets"  # one YAML file each; the comment on its first line describes it
BASE = "base"  # the key that names what a file builds on
MISSING = "???"  # a value that must be given


@dataclass(frozen=True)
class Layer:
    """What one source says, by key. `label`: a preset, the path of a file, "override" or "flag". `is_literal`: whether
    its values are taken as they are, `${…}` and `???` included."""

    label: str
    values: dict[str, object]
    lines: dict[str, int] = field(default_factory=dict)
    is_literal: bool = False

    def where(self, key: str) -> str:
        """A key as errors name it: with file and line, or as it stands on the command line."""
        if self.label == "flag":
            return f"--{key.rpartition('.')[2]}"
        return f"{self.label}:{self.lines[key]}: {key}" if key in self.lines else key


@dataclass(frozen=True)
class Setting:
    """A resolved value and its origin. `written`: its expression, all that may be shown of the environment's."""

    value: object
    origin: str = "default"
    written: str | None = None


def file_layers(path) -> list[Layer]:
    """The layers of a file and of what it builds on, the weakest first. Raises ConfigError."""
    layers, chain, path = [], [], Path(path)
    while path is not None:
        chain.append(path)
        if path.resolve() in [one.resolve() for one in chain[:-1]]:
            raise ConfigError(f"{BASE}: goes round in a circle: {' -> '.join(map(str, chain))}; remove one of them")
        values, lines = read_yaml(path)
        where = f"{path}:{lines.get(BASE)}: {BASE}"
        base = values.pop(BASE, None)
        layers.insert(0, Layer(f"preset {path.stem}" if path.parent == PRESETS_DIR else str(path), values, lines))
        path = None if base is None else _find_base(base, path, where)
    return layers


def override_layer(words: list[str], schema: Schema) -> Layer:
    """The layer of words such as data.resolution=512: text as it is, anything else in YAML's spelling."""
    values = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word} is not an override; write key=value, as data.resolution=512")
        key = key.replace("-", "_")
        values[key] = _read_text(schema[key], text, key) if key in schema else text
    return Layer("override", values)


def flag_layer(given: dict[str, object], schema: Schema) -> Layer:
    """The layer of flags, by the options' names."""
    keys = {stated.name: key for key, stated in schema.items()}
    return Layer("flag", {keys[name]: value for name, value in given.items()}, is_literal=True)


def last_value(layers: list[Layer], key: str, default=None):
    """What the strongest layer says of a key, unresolved."""
    return next((layer.values[key] for layer in reversed(layers) if key in layer.values), default)


def where_of(layers: list[Layer], key: str) -> str:
    """A key as errors name it, where the strongest layer says it."""
    return next((layer.where(key) for layer in reversed(layers) if key in layer.values), key)


def load(
    layers: list[Layer], schema: Schema, defaults: dict[str, object], may_lack: Callable = lambda _: False
) -> dict[str, Setting]:
    """Every setting of the schema by key, from `defaults` and `layers`, the weakest first. Raises ConfigError for an
    unknown key, a value that is missing (`???`, where an option `may_lack` one), unresolved, or not what it takes."""
    for layer in layers:
        _refuse_unknown(layer, schema)
    source = {key: layer for layer in layers for key in layer.values if key in schema}
    raw = {key: source[key].values[key] if key in source else defaults[key] for key in schema}
    is_literal = {key: key not in source or source[key].is_literal for key in schema}
    resolver = _Resolver({key: escape(value) if is_literal[key] else value for key, value in raw.items()})
    missing = {key for key in schema if raw[key] is REQUIRED or raw[key] == MISSING and not is_literal[key]}
    if key := next((key for key in schema if key in missing and not may_lack(schema[key])), None):
        raise ConfigError(_explain_missing(key, layers, source.get(key)))
    found = {}
    for key, stated in schema.items():
        if key in missing:
            found[key] = Setting(MISSING, _origin(source.get(key), key), written=MISSING)
        elif key not in source:
            found[key] = Setting(raw[key])
        elif is_literal[key]:
            found[key] = Setting(check_value(stated, raw[key], source[key].where(key)), source[key].label)
        else:
            found[key] = _resolve(key, stated, source[key], resolver, may_lack(stated))
        if stated.secret and isinstance(found[key].value, str) and found[key].written is None:
            note_hidden(found[key].value, f"${{oc.env:{stated.secret}}}")
            found[key] = replace(found[key], written=f"${{oc.env:{stated.secret},null}}")
    return found


def _resolve(key: str, stated: Option, layer: Layer, resolver: "_Resolver", keep_missing: bool) -> Setting:
    raw, where = layer.values[key], layer.where(key)
    value, variables = resolver.resolve(key, where)
    if value == MISSING and keep_missing:
        return Setting(MISSING, _origin(layer, key), written=raw)
    if value == MISSING:
        raise ConfigError(f"{where} {raw} refers to a value that is ???, so it must be given")
    if variables and isinstance(value, str):
        value = _read_text(stated, value, where)
    if isinstance(value, str | list) and stated.type is str and not stated.choices:
        words = value if isinstance(value, list) else []  # of a list, some may be cut out of a variable's text
        said = [(text, name) for name, text in variables.items()]
        said += [(word, name) for word in words for text, name in said if isinstance(word, str) and word in text]
        for text, name in said:
            note_hidden(text, f"${{oc.env:{name}}}")
    return Setting(check_value(stated, value, where), _origin(layer, key), raw if variables else None)


def _find_base(base, path: Path, where: str) -> Path:
    """A base is a path, relative to the file that names it, or the name of a preset."""
    if not isinstance(base, str):
        raise ConfigError(f"{where} {base} must be text: the name of a preset, or the path of a file")
    beside = path.parent / base
    if "/" in base or beside.suffix in (".yaml", ".yml"):
        if not beside.is_file():
            raise ConfigError(f"{where} {base} is not there; it is looked for in {path.parent.resolve()}")
        return beside
    if base not in list_presets():
        raise ConfigError(f"{where} {base} is not a preset; {did_you_mean(base, list_presets())}")
    return preset_path(base)


def _refuse_unknown(layer: Layer, schema: Schema) -> None:
    sections = {key.partition(".")[0] for key in schema if "." in key}
    for key, value in layer.values.items():
        if key in schema or (key in sections and value is None):
            continue
        if key in sections:
            raise ConfigError(
                f"{layer.where(key)} {value} must hold settings, one a line below it; {_known(key, schema)}"
            )
        raise ConfigError(f"{layer.where(key)} is not known; {_suggest(key, schema)}")


def _known(section: str, schema: Schema) -> str:
    return f"known: {', '.join(key.partition('.')[2] for key in schema if key.startswith(f'{section}.'))}"


def _suggest(key: str, schema: Schema) -> str:
    section, _, name = key.rpartition(".")
    for known, stated in schema.items():
        if name == known.rpartition(".")[2]:
            return f"{name} stands under {known.partition('.')[0]}: {known}" if "." in known else f"write {known}:"
        if name in stated.also:
            return f"it is called {known} here"
        if name in stated.opposite:
            return f"its opposite is called {known} here"
    if not section:
        return did_you_mean(name, _sections(schema))
    beside = {known.rpartition(".")[2]: known for known in schema if known.startswith(f"{section}.")}
    everywhere = {known.rpartition(".")[2]: known for known in schema}
    near = beside.get(nearest(name, beside)) or everywhere.get(nearest(name, everywhere))
    if near:
        return f"did you mean {near}?"
    return _known(section, schema) if beside else f"sections: {', '.join(_sections(schema))}"


def _sections(schema: Schema) -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in schema))


def _explain_missing(key: str, layers: list[Layer], layer: Layer | None) -> str:
    flag = f"--{key.rpartition('.')[2]}"
    if layer is None and any(one.label == "flag" and one.values for one in layers):
        return f"{flag} is missing; add it"
    if layer is None:
        return f"{key} is missing; add it to the config file, or {key}=VALUE"
    there = "" if layer.label.startswith("preset ") else "write a value there, or "
    return f"{layer.where(key)} is ???, so it must be given: {there}add {key}=VALUE"


def _origin(layer: Layer | None, key: str) -> str:
    if layer is None:
        return "default"
    is_file = key in layer.lines and not layer.label.startswith("preset ")
    return f"{layer.label}:{layer.lines[key]}" if is_file else layer.label


def _read_text(stated: Option, text: str, where: str):
    """A word of the command line, or of the environment, as the option takes it."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    if stated.type is str and not stated.is_list:
        return None if text == "null" and stated.may_be_none else text
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={for_yaml(text)}"]))
        return readable(values["value"])
    except (YAMLError, *OUT_OF_BOUNDS) as error:
        raise ConfigError(f"{where} {text} is not a value in YAML's spelling; lists are [a, b]") from error


def escape(value):
    """A value in which OmegaConf finds nothing to resolve."""
    return None if value is REQUIRED else map_text(value, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key as sections of values; plain keys stay beside the sections."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


class _Resolver:
    """Resolves `${…}` among all values, and knows which of them the environment has a part in."""

    _ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")

    def __init__(self, raw: dict[str, object]):
        from omegaconf import OmegaConf
        from omegaconf.resolvers import oc

        self._raw, self._asked = raw, {}
        watched = map_text(raw, lambda text: self._ENVIRONMENT.sub("${ppldm.env:", text))
        self._config = OmegaConf.create(tree_of(watched))

        def look(name, *default):
            self._asked[name] = read(name)
            return oc.env(name, *default)

        OmegaConf.register_resolver("ppldm.env", look, replace=True)

    def resolve(self, key: str, where: str) -> tuple[object, dict[str, str]]:
        """(value, what the environment said, by variable); MISSING for what refers to one. Raises ConfigError."""
        from omegaconf import OmegaConf
        from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

        self._asked.clear()
        try:
            value = OmegaConf.select(self._config, key)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except InterpolationToMissingValueError:
            return MISSING, {}
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0].partition("resolving interpolation: ")
            raise ConfigError(
                f"{where} {self._raw[key]} cannot be resolved: {(reason[2] or reason[0]).strip(chr(34))}; "
                "write ${section.name} of another key, or ${oc.env:NAME,default}"
            ) from error
        return value, dict(self._asked)


def list_presets() -> dict[str, str]:
    """The description of each preset, in one line, by name."""
    paths = sorted(PRESETS_DIR.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in paths}


def preset_path(name: str) -> Path:
    """The file of a preset. Raises ConfigError with the nearest name."""
    if name not in list_presets():
        raise ConfigError(f"--preset {name} is not known; {did_you_mean(name, list_presets())}")
    return PRESETS_DIR / f"{name}.yaml"


# Bytes of a file's name that are not UTF-8 are lone surrogates in Python, which YAML does not take: characters of a
# private plane stand for them there, and one of these that is meant itself follows _ITSELF.
_ITSELF, _BYTES = "\U0010fe7f", range(0x80, 0x100)
_TO_YAML = {0xDC00 + byte: chr(0x10FE00 + byte) for byte in _BYTES}
_TO_YAML |= {ord(one): _ITSELF + one for one in (_ITSELF, *_TO_YAML.values())}
_FROM_YAML = re.compile("\U0010fe7f([\U0010fe7f-\U0010feff])|([\U0010fe80-\U0010feff])")


def map_text(value, change: Callable[[str], str]):
    """A value, or a list or mapping of them, in which all text is changed."""
    if isinstance(value, list | tuple):
        return [map_text(one, change) for one in value]
    if isinstance(value, dict):
        return {name: map_text(one, change) for name, one in value.items()}
    return change(value) if isinstance(value, str) else value


def for_yaml(value):
    """A value, or a list or mapping of them, as YAML takes it."""
    return map_text(value, lambda text: text.translate(_TO_YAML))


# What is raised for what is no value of its kind (`!!int x`), nested too deeply, or a number of thousands of digits.
OUT_OF_BOUNDS = (ValueError, KeyError, AttributeError, TypeError, RecursionError)


def readable(found):
    """The inverse of `for_yaml`. Raises one of OUT_OF_BOUNDS for a number that cannot be written again."""
    str(found)
    return map_text(
        found, lambda text: _FROM_YAML.sub(lambda one: one[1] or chr(ord(one[2]) - 0x10FE00 + 0xDC00), text)
    )


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """(the values of a file, unresolved, and their lines from 1), by key: there are plain keys (`family: ldm`) and
    sections of settings. An empty section is a plain key of None. Raises ConfigError with file, line and reason."""
    try:
        text = read_given_text(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); name a YAML file") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[str, int]]:
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
    return _flatten(root, values, name)


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
