"""The language of `--where`: what an expression is, and how text becomes one. Nothing is ever handed to `eval`.

    width >= 512 and height >= 512 and pwatermark <= 0.5 and not (license in ("", "unknown") or nsfw == true)

    comparison   < <= > >= == !=, also in chains (4 < aesthetic <= 6)
    in           field in (value, value, ...), field not in (...)
    and or not   and parentheses; `and` binds more tightly than `or`
    values       numbers, "text" or 'text' (with \\" \\' \\\\), true, false
    fields       words; a name that is not a word goes between backquotes: `my key`

`str` of an expression is its one spelling; parsing that gives the expression again.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

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
        return f"not {_wrap(self.term, All | Any)}"


@dataclass(frozen=True)
class All:
    """`term and term ...`."""

    terms: tuple["Expression", ...]

    def __str__(self) -> str:
        return " and ".join(_wrap(term, All | Any) for term in self.terms)


@dataclass(frozen=True)
class Any:
    """`term or term ...`."""

    terms: tuple["Expression", ...]

    def __str__(self) -> str:
        return " or ".join(_wrap(term, Any) for term in self.terms)


Expression = Compare | Member | Not | All | Any


def _wrap(term: Expression, kinds) -> str:
    return f"({term})" if isinstance(term, kinds) else str(term)


def parse_expression(text: str) -> Expression:
    """The expression that a text says. Raises ConfigError that points at the place."""
    return _Parser(text, text).parse()


def parse_comparison(field: str, comparison: str) -> Expression:
    """`field: comparison`, as in `pwatermark: <=0.5`. Raises ConfigError."""
    return _Parser(comparison, f"{field}: {comparison}").parse_rest(_make_field(field))


def parse_lambda(field: str, rule: str) -> Expression | None:
    """A rule such as `lambda s: s > 4.5` on a field; None where it is not a lambda. Raises ConfigError."""
    head = _LAMBDA.match(rule)
    return _Parser(rule, rule, head.end(), {head["name"]: _make_field(field)}).parse() if head else None


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


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int


class _Parser:
    """Recursive descent. `shown` is the text for errors; its end is `text`. `fields`: the only names, if given."""

    def __init__(self, text: str, shown: str, start: int = 0, fields: dict[str, Field] | None = None):
        self._text, self._shown, self._fields = text, shown, fields
        self._depth = 0
        self._token = self._next(start)

    def parse(self) -> Expression:
        expression = self._or()
        return self._end(expression)

    def parse_rest(self, left: Field) -> Expression:
        """The comparison of which `left` is not written."""
        return self._end(self._comparison_of(left, self._token.start))

    def _end(self, expression: Expression) -> Expression:
        if self._token.kind != "end":
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
        if self._take("not"):
            expression = Not(self._not())
        elif self._take("("):
            expression = self._or()
            if not self._take(")"):
                raise self._error("`and`, `or` or the closing parenthesis is due")
        else:
            start = self._token.start
            expression = self._comparison_of(self._operand(), start)
        self._depth -= 1
        return expression

    def _comparison_of(self, left: Field | Literal, start: int) -> Expression:
        negated = self._take("not")
        if self._take("in"):
            member = Member(left, self._values())
            self._require_field((left,), start)
            return Not(member) if negated else member
        if negated:
            raise self._error("`in` is due")
        comparisons = []
        while self._token.text in SIGNS:
            sign, place = self._token.text, self._token
            self._token = self._next(place.start + len(sign))
            right = self._operand()
            if sign[0] in "<>" and any(isinstance(o, Literal) and isinstance(o.value, bool) for o in (left, right)):
                raise self._error("true and false have no order; only == and != compare them", place)
            comparisons.append(Compare(left, sign, right))
            left = right
        if not comparisons:
            raise self._error("one of < <= > >= == != in is due")
        self._require_field([side for c in comparisons for side in (c.left, c.right)], start)
        return all_of(comparisons)

    def _require_field(self, sides: Iterable[Field | Literal], start: int) -> None:
        if not any(isinstance(side, Field) for side in sides):
            raise self._error("a comparison needs a field", _Token("", "", start))

    def _values(self) -> tuple[Literal, ...]:
        closing = {"(": ")", "[": "]"}.get(self._token.text)
        if closing is None:
            raise self._error("a list in parentheses is due")
        values = []
        while not values or self._token.text == ",":
            self._token = self._next(self._token.start + 1)
            if values and self._token.text == closing:
                break
            value = self._operand()
            if not isinstance(value, Literal):
                raise self._error("a list holds only numbers, text, true and false")
            values.append(value)
        if not self._take(closing):
            raise self._error(f"a comma or {closing} is due")
        return tuple(values)

    def _operand(self) -> Field | Literal:
        token, operand = self._token, None
        if token.kind == "number":
            operand = Literal(self._number(token))
        elif token.kind == "text":
            operand = Literal(re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL))
        elif token.text in _TRUTHS:
            operand = Literal(_TRUTHS[token.text])
        elif token.kind == "field" or (token.kind == "word" and token.text not in _KEYWORDS):
            operand = self._field(token)
        if operand is None:
            raise self._error("a field, a number or text is due")
        self._token = self._next(token.start + len(token.text))
        return operand

    def _field(self, token: _Token) -> Field:
        name = token.text.strip("`")
        if self._fields is None:
            return Field(name)
        if name not in self._fields:
            raise self._error(f"only {', '.join(self._fields)} may be named here", token)
        return self._fields[name]

    def _number(self, token: _Token) -> int | float:
        value = float(token.text)
        if math.isinf(value):
            raise self._error("this number is too large", token)
        return int(token.text) if re.fullmatch(r"[+-]?\d+", token.text) else value

    def _take(self, text: str) -> bool:
        """Pass over a keyword or sign, if it is the next token."""
        found = self._token.kind in ("word", "sign") and self._token.text == text
        if found:
            self._token = self._next(self._token.start + len(text))
        return found

    def _next(self, start: int) -> _Token:
        match = _TOKEN.match(self._text, start)
        if not match:
            begin = start + len(self._text[start:]) - len(self._text[start:].lstrip())
            problem = "this text has no closing quote" if self._text[begin] in "\"'`" else "this is not understood"
            raise self._error(problem, _Token("", "", begin))
        return _Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup))

    def _error(self, problem: str, token: _Token | None = None) -> ConfigError:
        at = (token or self._token).start + len(self._shown) - len(self._text)
        before, after = self._shown[max(0, at - 40) : at], self._shown[at : at + 40]
        marked = " ".join(f"{before} --> {after}".split())
        return ConfigError(f"--where: {problem} at character {at + 1}: {marked or '(nothing is there)'}")
