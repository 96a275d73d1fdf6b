"""The language of `--where`: what an expression is, and how text becomes one. Nothing is ever handed to `eval`.

    width >= 512 and height >= 512 and pwatermark <= 0.5 and not (license in ("", "unknown") or nsfw == true)

    comparison   < <= > >= == !=, also in chains (4 < aesthetic <= 6)
    in           field in (value, value, ...), field not in (...)
    and or not   and parentheses; `and` binds more tightly than `or`
    values       numbers, "text" or 'text' (with \\" \\' \\\\), true, false
    fields       words; a name that is not a word goes between backquotes: `my key`

`str` of an expression is its one spelling; parsing that gives the expression again. Fields are `width` and `height` (of
the index), `caption`, and any key of a row's metadata. There are other notations:

    pwatermark: "<=0.5"                          YAML or JSON: fields with comparisons
    [['aesthetic_score', 'lambda s: s > 4.5']]   YAML or JSON: a list of rules; of their Python, what the expression
                                                 language has is understood
    @FILE                                        any of them in a file; YAML or JSON in .yaml, .yml, .json

All comparisons, or all rules, must hold. Below `filters:` or `dataset_filters:`, as in the configs that they come from,
they are the same.
"""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from ...utils.errors import ConfigError

MAX_DEPTH = 100
ORDER_SIGNS = ("<", "<=", ">", ">=")
SIGNS = (*ORDER_SIGNS, "==", "!=")

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.]))
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<field>`[^`]+`)
      | (?P<word>[^\W\d]\w*)
      | (?P<sign><=|>=|==|!=|[<>()\[\],])
      | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_LAMBDA = re.compile(r"\s*lambda\s+(?P<name>[^\W\d]\w*)\s*:")
_WORD = re.compile(r"[^\W\d]\w*")
_TRUTHS = {"true": True, "True": True, "false": False, "False": False}
# The beginning of YAML or JSON that is not an expression: a list, an object, or `key: ...`.
_STRUCTURED = re.compile(r"""\s*(?:[\[{]|-\s|(?:[\w. -]+|"[^"]*"|'[^']*'):\s)""")
_HEADINGS = ("filters", "dataset_filters")
_KEYWORDS = {"and", "or", "not", "in", *_TRUTHS}

Value = bool | int | float | str


@dataclass(frozen=True)
class Field:
    """A field of a row."""

    name: str

    def __str__(self) -> str:
        plain = _WORD.fullmatch(self.name) and self.name not in _KEYWORDS
        return self.name if plain else f"`{self.name}`"


@dataclass(frozen=True)
class Literal:
    """A number, text or truth value."""

    value: Value

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return str(self.value).lower()
        if isinstance(self.value, str):
            return '"' + re.sub(r'(["\\])', r"\\\1", self.value) + '"'
        return repr(self.value)


@dataclass(frozen=True)
class Compare:
    """`left` sign `right`."""

    left: Field | Literal
    sign: str
    right: Field | Literal

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"


@dataclass(frozen=True)
class Member:
    """`item in (values)`."""

    item: Field | Literal
    values: tuple[Literal, ...]

    def __str__(self) -> str:
        return f"{self.item} in ({', '.join(map(str, self.values))})"


@dataclass(frozen=True)
class Not:
    """`not term`."""

    term: "Expression"

    def __str__(self) -> str:
        return f"not {_wrap(self.term)}"


@dataclass(frozen=True)
class All:
    """`term and term ...`."""

    terms: tuple["Expression", ...]

    def __str__(self) -> str:
        return " and ".join(_wrap(term) for term in self.terms)


@dataclass(frozen=True)
class Any:
    """`term or term ...`."""

    terms: tuple["Expression", ...]

    def __str__(self) -> str:
        return " or ".join(f"({term})" if isinstance(term, Any) else str(term) for term in self.terms)


Expression = Compare | Member | Not | All | Any


def _wrap(term: Expression) -> str:
    return f"({term})" if isinstance(term, All | Any) else str(term)


def parse_expression(text: str) -> Expression:
    """The expression that a text says. Raises ConfigError that points at the place."""
    return _Parser(text, text).parse()


def all_of(terms: Iterable[Expression]) -> Expression:
    """That every one of the terms holds; there is at least one."""
    terms = tuple(terms)
    return terms[0] if len(terms) == 1 else All(terms)


def field_names(expression: Expression) -> set[str]:
    """The names of all fields of an expression."""
    if isinstance(expression, Not):
        return field_names(expression.term)
    if isinstance(expression, All | Any):
        return set().union(*map(field_names, expression.terms))
    sides = (expression.item,) if isinstance(expression, Member) else (expression.left, expression.right)
    return {side.name for side in sides if isinstance(side, Field)}


def _make_field(name: str) -> Field:
    if not name or "`" in name:
        raise ConfigError(f"--where: {name!r} is not the name of a field")
    return Field(name)


class _Parser:
    """Recursive descent. `shown` is the text for errors; its end is `text`. `fields`: the only names, if given."""

    def __init__(self, text: str, shown: str, start: int = 0, fields: dict[str, Field] | None = None):
        self._text, self._shown, self._fields = text, shown, fields
        self._depth = 0
        self._move(start)

    def parse(self, left: Field | None = None) -> Expression:
        """The expression; with `left`, the comparison of which that is not written."""
        expression = self._comparison_of(left, self._start) if left else self._or()
        if self._kind != "end":
            raise self._error("`and`, `or` or the end is due")
        return expression

    def _or(self) -> Expression:
        terms = [self._and()]
        while self._take("or"):
            terms.append(self._and())
        return terms[0] if len(terms) == 1 else Any(tuple(terms))

    def _and(self) -> Expression:
        terms = [self._not()]
        while self._take("and"):
            terms.append(self._not())
        return all_of(terms)

    def _not(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"this is nested over {MAX_DEPTH} times")
        start = self._start
        if self._take("not"):
            expression = Not(self._not())
        elif self._take("("):
            expression = self._or()
            if not self._take(")"):
                raise self._error("`and`, `or` or the closing parenthesis is due")
        else:
            expression = self._comparison_of(self._operand(), start)
        self._depth -= 1
        return expression

    def _comparison_of(self, left: Field | Literal, start: int) -> Expression:
        negated, sides, comparisons = self._take("not"), [left], []
        if self._take("in"):
            member = Member(left, self._values())
            self._require_field(sides, start)
            return Not(member) if negated else member
        if negated:
            raise self._error("`in` is due")
        while self._token in SIGNS:
            sign, place = self._token, self._start
            self._move(place + len(sign))
            right = self._operand()
            if sign in ORDER_SIGNS and any(isinstance(o, Literal) and isinstance(o.value, bool) for o in (left, right)):
                raise self._error("true and false have no order; only == and != compare them", place)
            comparisons.append(Compare(left, sign, right))
            sides.append(right)
            left = right
        if not comparisons:
            raise self._error("one of < <= > >= == != in is due")
        self._require_field(sides, start)
        return all_of(comparisons)

    def _require_field(self, sides: Iterable[Field | Literal], start: int) -> None:
        if not any(isinstance(side, Field) for side in sides):
            raise self._error("a comparison needs a field", start)

    def _values(self) -> tuple[Literal, ...]:
        closing = {"(": ")", "[": "]"}.get(self._token)
        if closing is None:
            raise self._error("a list in parentheses is due")
        values: list[Literal] = []
        while not values or self._token == ",":
            self._move(self._start + 1)
            if values and self._token == closing:
                break
            value = self._operand()
            if not isinstance(value, Literal):
                raise self._error("a list holds only numbers, text, true and false")
            values.append(value)
        if not self._take(closing):
            raise self._error(f"a comma or {closing} is due")
        return tuple(values)

    def _operand(self) -> Field | Literal:
        text, operand = self._token, None
        if self._kind == "number":
            if math.isinf(value := float(text)):
                raise self._error("this number is too large")
            operand = Literal(int(text) if re.fullmatch(r"[+-]?\d+", text) else value)
        elif self._kind == "text":
            operand = Literal(re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL))
        elif text in _TRUTHS:
            operand = Literal(_TRUTHS[text])
        elif self._kind == "field" or (self._kind == "word" and text not in _KEYWORDS):
            name = text.strip("`")
            if self._fields is not None and name not in self._fields:
                raise self._error(f"only {', '.join(self._fields)} may be named here")
            operand = Field(name) if self._fields is None else self._fields[name]
        if operand is None:
            raise self._error("a field, a number or text is due")
        self._move(self._start + len(text))
        return operand

    def _take(self, text: str) -> bool:
        """Pass over a keyword or sign, if it is the next token."""
        found = self._kind in ("word", "sign") and self._token == text
        if found:
            self._move(self._start + len(text))
        return found

    def _move(self, start: int) -> None:
        """To the token that comes from `start` on."""
        match = _TOKEN.match(self._text, start)
        if not match:
            begin = start + len(self._text[start:]) - len(self._text[start:].lstrip())
            problem = "this text has no closing quote" if self._text[begin] in "\"'`" else "this is not understood"
            raise self._error(problem, begin)
        self._kind = kind = match.lastgroup or ""
        self._token, self._start = match[kind], match.start(kind)

    def _error(self, problem: str, start: int | None = None) -> ConfigError:
        at = (self._start if start is None else start) + len(self._shown) - len(self._text)
        before, after = self._shown[max(0, at - 40) : at], self._shown[at : at + 40]
        marked = " ".join(f"{before} --> {after}".split())
        return ConfigError(f"--where: {problem} at character {at + 1}: {marked or '(nothing is there)'}")


def parse_where(text: str) -> Expression:
    """The expression of a `--where`. Raises ConfigError that says what is wrong, and where."""
    if text.startswith("@"):
        text, structured = _read(text[1:])
    else:
        structured = _STRUCTURED.match(text) is not None
    if not structured:
        return parse_expression(text)
    # Nodes, not values: nothing is taken for a number or a date, and a field may come twice.
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f'--where: not YAML ({problem}); a comparison goes in quotes, as in key: ">=5"') from error
    return _parse_node(node)


def _read(name: str) -> tuple[str, bool]:
    """(text of a file, whether it is YAML or JSON)."""
    try:
        path = Path(os.path.expanduser(name))
        return path.read_text(encoding="utf-8-sig"), path.suffix.lower() in (".yaml", ".yml", ".json")
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"--where: cannot read {name!r} ({problem}); `@` stands before the name of a file") from error


def _parse_node(node: yaml.Node | None) -> Expression:
    if isinstance(node, yaml.ScalarNode):
        return parse_expression(node.value)
    if isinstance(node, yaml.MappingNode) and [key.value for key, _ in node.value] in ([name] for name in _HEADINGS):
        return _parse_node(node.value[0][1])
    if isinstance(node, yaml.MappingNode) and node.value:
        return all_of(_parse_comparison(key, comparison) for key, comparison in node.value)
    if isinstance(node, yaml.SequenceNode) and node.value:
        return all_of(map(_parse_rule, [node] if _texts(node) else node.value))
    raise ConfigError("--where: no condition is there; write an expression, fields with comparisons or a list of rules")


def _parse_comparison(key: yaml.Node, comparison: yaml.Node) -> Expression:
    if not (isinstance(key, yaml.ScalarNode) and isinstance(comparison, yaml.ScalarNode)):
        raise ConfigError(f'--where: {_place(key)}: no comparison; write it as in pwatermark: "<=0.5"')
    return _Parser(comparison.value, f"{key.value}: {comparison.value}").parse(_make_field(key.value))


def _parse_rule(node: yaml.Node) -> Expression:
    field, rule = _texts(node) or ("", "")
    head = _LAMBDA.match(rule)
    if head is None:
        raise ConfigError(f"--where: {_place(node)}: no rule; write it as in ['aesthetic_score', 'lambda s: s > 4.5']")
    return _Parser(rule, rule, head.end(), {head["name"]: _make_field(field)}).parse()


def _texts(node: yaml.Node) -> tuple[str, str] | None:
    """The two texts of a list of two texts."""
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    is_pair = len(items) == 2 and all(isinstance(item, yaml.ScalarNode) for item in items)
    return tuple(item.value for item in items) if is_pair else None


def _place(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}, character {node.start_mark.column + 1}"
