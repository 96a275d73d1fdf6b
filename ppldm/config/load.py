"""Settings from YAML files, overrides and flags: merged by strength, resolved, checked, each with its origin.

Strength, the strongest first: flags, overrides (`data.resolution=512`), the file, what it builds on (`base:`), the
preset, defaults. `???` is a value that must be given, `${data.resolution}` that of another key, `${oc.env:NAME}` and
`${oc.env:NAME,default}` that of an environment variable. What a flag says is taken as it is.

A schema is the options by key, such as data.resolution; plain keys have no section. Nothing here knows what the
settings are for.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..utils import hidden
from ..utils.errors import ConfigError
from ..utils.text import did_you_mean, nearest
from ..utils.variables import read
from .option import REQUIRED, Option, check_value
from .presets import PRESETS_DIR, list_presets, preset_path
from .yaml_file import OUT_OF_BOUNDS, for_yaml, read_yaml, readable

BASE = "base"  # the key that names what a file builds on
MISSING = "???"  # a value that must be given

OptionsByKey = dict[str, Option]


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
    """A resolved value and where it came from. `written`: the expression of a value that came from the environment,
    which is all that may be saved or shown of it."""

    value: object
    origin: str = "default"
    written: str | None = None


def preset_layers(name: str) -> list[Layer]:
    """The layers of a preset, the weakest first. Raises ConfigError with the nearest name."""
    return _file_layers(preset_path(name))


def file_layers(path) -> list[Layer]:
    """The layers of a file and of what it builds on, the weakest first. Raises ConfigError."""
    return _file_layers(Path(path))


def override_layer(words: list[str], schema: OptionsByKey) -> Layer:
    """The layer of words such as data.resolution=512: text as it is, anything else in YAML's spelling."""
    values = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word} is not an override; write key=value, as data.resolution=512")
        key = key.replace("-", "_")
        values[key] = _read_text(schema[key], text, key) if key in schema else text
    return Layer("override", values)


def flag_layer(given: dict[str, object], schema: OptionsByKey) -> Layer:
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
    layers: list[Layer], schema: OptionsByKey, defaults: dict[str, object], keep_missing: bool = False
) -> dict[str, Setting]:
    """Every setting of the schema by key, from `layers`, the weakest first. `defaults`: by key, of every option.

    Raises ConfigError for an unknown key, a value that is missing, cannot be resolved, or is not what the option takes.
    With `keep_missing`, one that is missing, or refers to one, is `???`.
    """
    for layer in layers:
        _refuse_unknown(layer, schema)
    source = {key: layer for layer in layers for key in layer.values if key in schema}
    raw = {key: source[key].values[key] if key in source else defaults[key] for key in schema}
    is_literal = {key: key not in source or source[key].is_literal for key in schema}
    resolver = _Resolver({key: escape(value) if is_literal[key] else value for key, value in raw.items()})
    missing = {key for key in schema if raw[key] is REQUIRED or raw[key] == MISSING and not is_literal[key]}
    if missing and not keep_missing:
        key = next(key for key in schema if key in missing)
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
            found[key] = _resolve(key, stated, source[key], resolver, keep_missing)
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
        _hide(value, variables)
    return Setting(check_value(stated, value, where), _origin(layer, key), raw if variables else None)


def _hide(value, variables: dict[str, str]) -> None:
    """Note the variables' texts, and words of a list that were cut out of one."""
    for name, text in variables.items():
        hidden.note(text, f"${{oc.env:{name}}}")
    for word in value if isinstance(value, list) else ():
        for name, text in variables.items():
            if isinstance(word, str) and word != text and word in text:
                hidden.note(word, f"${{oc.env:{name}}}")


def _file_layers(path: Path) -> list[Layer]:
    layers, chain = [], []
    while path is not None:
        chain.append(path)
        if path.resolve() in [one.resolve() for one in chain[:-1]]:
            raise ConfigError(f"{BASE}: goes round in a circle: {' -> '.join(map(str, chain))}; remove one of them")
        found = read_yaml(path)
        values = dict(found.values)
        where = f"{path}:{found.lines.get(BASE)}: {BASE}"
        base = values.pop(BASE, None)
        is_preset = path.parent == PRESETS_DIR
        layers.insert(0, Layer(f"preset {path.stem}" if is_preset else str(path), values, found.lines))
        path = None if base is None else _find_base(base, path, where)
    return layers


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


def _refuse_unknown(layer: Layer, schema: OptionsByKey) -> None:
    sections = {key.partition(".")[0] for key in schema if "." in key}
    for key, value in layer.values.items():
        if key in schema or (key in sections and value is None):
            continue
        if key in sections:
            raise ConfigError(
                f"{layer.where(key)} {value} must hold settings, one a line below it; {_known(key, schema)}"
            )
        raise ConfigError(f"{layer.where(key)} is not known; {_suggest(key, schema)}")


def _known(section: str, schema: OptionsByKey) -> str:
    names = [key.partition(".")[2] for key in schema if key.startswith(f"{section}.")]
    return f"known: {', '.join(names)}"


def _suggest(key: str, schema: OptionsByKey) -> str:
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


def _sections(schema: OptionsByKey) -> list[str]:
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
    if isinstance(value, list):
        return [escape(one) for one in value]
    if isinstance(value, dict):
        return {name: escape(one) for name, one in value.items()}
    if not isinstance(value, str):
        return None if value is REQUIRED else value
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)


class _Resolver:
    """Resolves `${…}` among all values, and knows which of them the environment has a part in."""

    _ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")

    def __init__(self, raw: dict[str, object]):
        from omegaconf import OmegaConf
        from omegaconf.resolvers import oc

        self._raw, self._asked = raw, {}
        tree = {}
        for key, value in raw.items():
            section, _, name = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = self._watched(value)
        self._config = OmegaConf.create(tree)

        def look(name, *default):
            self._asked[name] = read(name)
            return oc.env(name, *default)

        OmegaConf.register_resolver("ppldm.env", look, replace=True)

    def _watched(self, value):
        if isinstance(value, list):
            return [self._watched(one) for one in value]
        if isinstance(value, dict):
            return {name: self._watched(one) for name, one in value.items()}
        return self._ENVIRONMENT.sub("${ppldm.env:", value) if isinstance(value, str) else value

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
