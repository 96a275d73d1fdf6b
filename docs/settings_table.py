"""The site's page of settings, made from the options."""

from pathlib import Path

from ppldm.config.option import REQUIRED, Option, format_default
from ppldm.config.recipe import defaults, schema_of

_HEAD = """# Settings

Every setting of training, by its key in config files and overrides. Its flag is the last part of the key with `--`:
`--resolution 512` on the command line is `data.resolution=512`. `ppldm train --help` shows the same, and
[training.md](training.md) explains what the settings do, with formulas.

*part of the run*: a checkpoint is resumed only with the value that it was trained with (`--accept_changes NAME` lets a
change through). *Trainer*, *loop*: under PaddleNLP's Trainer, in the hand-written loop; where one value is given, both.
"""
_COLUMNS = "| setting | default | values | meaning |\n| --- | --- | --- | --- |\n"
_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def settings_table(configs: dict[str, type]) -> str:
    """The page for families by name with their settings: those of each, then those that all share."""
    found, stated_at = [_HEAD], []
    for family, config in configs.items():
        alike = {}
        for name, stated in _section(config, "model").items():
            at = next((at for first, at in stated_at if first == (name, stated)), None)
            if at:
                alike[name] = at
            else:
                stated_at.append(((name, stated), family))
        found.append(f"\n## model, family {family}\n\n" + _rows(config, "model", alike))
        for at in dict.fromkeys(alike.values()):
            found.append(f"\nAs of family {at}: {', '.join(f'`{name}`' for name in alike if alike[name] == at)}.\n")
        if own := getattr(config, "loop_defaults", {}):
            shown = ", ".join(f"`{name}` {value}" for name, value in own.items())
            found.append(f"\nOther defaults in the loop: {shown}.\n")
    (first, *_) = configs.values()
    sections = dict.fromkeys(stated.section for stated in schema_of(first).values())
    found += [f"\n## {section}\n\n" + _shared(configs, section) for section in sections if section != "model"]
    return "".join(found)


def _section(config: type, section: str) -> dict[str, Option]:
    return {stated.name: stated for stated in schema_of(config).values() if stated.section == section}


def _shared(configs: dict[str, type], section: str) -> str:
    """The rows of a section, those first that all families share or the first of them has."""
    found, seen = _COLUMNS, set()
    for config in configs.values():
        found += _rows(config, section, seen).removeprefix(_COLUMNS)
        seen |= _section(config, section).keys()
    return found


def _rows(config: type, section: str, without=()) -> str:
    usual = {loop: defaults(config, loop) for loop in (False, True)}
    cells = (
        (_names(stated), _defaults(usual[False][stated.key], usual[True][stated.key]), _values(stated), _text(stated))
        for name, stated in _section(config, section).items()
        if name not in without
    )
    return _COLUMNS + "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _names(stated: Option) -> str:
    others = [f"`--{other}`" for other in stated.also] + [f"not `--{other}`" for other in stated.opposite]
    return ", ".join([f"`{stated.key}`", *others])


def _defaults(trainer, loop) -> str:
    shown = [_shown(trainer), _shown(loop)]
    return shown[0] if shown[0] == shown[1] else f"Trainer {shown[0]}, loop {shown[1]}"


def _shown(value) -> str:
    if value is REQUIRED:
        return "must be given"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return format_default(value) or "none"


def _values(stated: Option) -> str:
    if stated.choices:
        words = ", ".join(f"`{choice}`" for choice in stated.choices)
    else:
        words = " ".join(filter(None, [stated.kind or _TYPES[stated.type], str(stated.bounds or "")]))
    many = "list of " if stated.is_list else "names, each with a " if stated.is_table else ""
    return many + words + (f"; {stated.unit}" if stated.unit else "")


def _text(stated: Option) -> str:
    text = stated.help.replace("|", "\\|")
    if stated.needs and not stated.needs.beside:
        text += f" Needs {stated.needs.words}."
    if len(stated.scripts) == 1:
        text += f" {'Loop' if stated.scripts == ('loop',) else 'Trainer'} only."
    entry = stated.name if stated.identity or stated.part_of is True else stated.part_of
    named = f", as `{entry}`" if entry and entry != stated.name else ""
    by_content = (
        "" if entry or stated.kind not in ("network", "model", "tokenizer") else " *part of the run, by content*"
    )
    return text + (f" *part of the run{named}*" if entry else by_content)
