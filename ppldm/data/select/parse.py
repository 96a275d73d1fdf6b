"""`--where`: which rows to train on, in any of three notations.

    width>=512 and pwatermark<=0.5               an expression (ppldm.data.select.expression)
    pwatermark: "<=0.5"                          YAML or JSON: fields with comparisons
    [['aesthetic_score', 'lambda s: s > 4.5']]   YAML or JSON: a list of rules; of their Python, what the expression
                                                 language has is understood
    @FILE                                        any of them in a file; YAML or JSON in .yaml, .yml, .json

All comparisons, or all rules, must hold. Below `filters:` or `dataset_filters:`, as in the configs that they come from,
they are the same. Fields are `width` and `height` (of the index), `caption`, and any key of a row's metadata.
"""

import os
import re
from pathlib import Path

import yaml

from ...utils.errors import ConfigError
from .expression import Expression, all_of, parse_comparison, parse_expression, parse_lambda

# The beginning of YAML or JSON that is not an expression: a list, an object, or `key: ...`.
_STRUCTURED = re.compile(r"""\s*(?:[\[{]|-\s|(?:[\w. -]+|"[^"]*"|'[^']*'):\s)""")

_HEADINGS = ("filters", "dataset_filters")


def parse_where(text: str) -> Expression:
    """The expression of a `--where`. Raises ConfigError that says what is wrong, and where."""
    if text.startswith("@"):
        text, structured = _read(text[1:])
    else:
        structured = _STRUCTURED.match(text) is not None
    return _parse_yaml(text) if structured else parse_expression(text)


def _read(name: str) -> tuple[str, bool]:
    """(text of a file, whether it is YAML or JSON)."""
    try:
        path = Path(os.path.expanduser(name))
        return path.read_text(encoding="utf-8-sig"), path.suffix.lower() in (".yaml", ".yml", ".json")
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"--where: cannot read {name!r} ({problem}); `@` stands before the name of a file") from error


def _parse_yaml(text: str) -> Expression:
    # Nodes, not values: nothing is taken for a number or a date, and a field may come twice.
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f'--where: not YAML ({problem}); a comparison goes in quotes, as in key: ">=5"') from error
    return _parse_node(node)


def _parse_node(node: yaml.Node | None) -> Expression:
    if isinstance(node, yaml.ScalarNode):
        return parse_expression(node.value)
    if isinstance(node, yaml.MappingNode) and [key.value for key, _ in node.value] in ([name] for name in _HEADINGS):
        return _parse_node(node.value[0][1])
    if isinstance(node, yaml.MappingNode) and node.value:
        return all_of(_parse_pair(key, comparison) for key, comparison in node.value)
    if isinstance(node, yaml.SequenceNode) and node.value:
        return all_of(map(_parse_rule, [node] if _texts(node) else node.value))
    raise ConfigError("--where: no condition is there; write an expression, fields with comparisons or a list of rules")


def _parse_pair(key: yaml.Node, comparison: yaml.Node) -> Expression:
    if not (isinstance(key, yaml.ScalarNode) and isinstance(comparison, yaml.ScalarNode)):
        raise ConfigError(f'--where: {_place(key)}: no comparison; write it as in pwatermark: "<=0.5"')
    return parse_comparison(key.value, comparison.value)


def _parse_rule(node: yaml.Node) -> Expression:
    texts = _texts(node)
    expression = parse_lambda(*texts) if texts else None
    if expression is None:
        raise ConfigError(f"--where: {_place(node)}: no rule; write it as in ['aesthetic_score', 'lambda s: s > 4.5']")
    return expression


def _texts(node: yaml.Node) -> tuple[str, str] | None:
    """The two texts of a list of two texts."""
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    is_pair = len(items) == 2 and all(isinstance(item, yaml.ScalarNode) for item in items)
    return tuple(item.value for item in items) if is_pair else None


def _place(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}, character {node.start_mark.column + 1}"
