"""Which metadata rows are wanted: flags, presets and `--where` become one list of expressions, all of which must hold.

Each is counted by itself: a row is dropped by the first that does not hold for it.
"""

from ...data.select.expression import All, Compare, Expression, Field, Literal, Member
from ...data.select.parse import parse_where
from ...utils.errors import ConfigError

# The conditions of the published recipes. LAION2B-en is English by itself, and has no column that says so.
PRESETS: dict[str, dict[str, float | str]] = {
    "laion2b-en": {"min_width": 512, "min_height": 512, "max_punsafe": 0.98, "min_aesthetic": 4.5},
    "laion-art": {"language": "en", "min_width": 512, "min_height": 512},
}

# The flags of `ppldm filter` that bound a column.
BOUNDS = (
    "min_width", "min_height", "max_width", "max_height", "max_punsafe", "max_pwatermark", "min_aesthetic",
    "min_similarity", "language",
)  # fmt: skip
# Bounds are inclusive.
_SIGNS = {"min": ">=", "max": "<="}


def merge_bounds(preset: str | None, bounds: dict) -> dict:
    """The bounds of a preset, and over them those of `bounds` that are not None. Raises ConfigError."""
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"--preset {preset} is not known; choose one of {', '.join(PRESETS)}")
    own = PRESETS[preset] if preset else {}
    return {**own, **{name: value for name, value in bounds.items() if value is not None}}


def make_conditions(bounds: dict, where: str | None) -> tuple[Expression, ...]:
    """The conditions of bounds and of `--where`, whose outermost `and` divides it into several. Raises ConfigError.

    bounds: `min_FIELD` and `max_FIELD` numbers, `language` a code or several with commas between.
    """
    conditions = [_bound(name, value) for name, value in bounds.items()]
    if where:
        expression = parse_where(where)
        conditions += expression.terms if isinstance(expression, All) else [expression]
    return tuple(dict.fromkeys(conditions))


def _bound(name: str, value) -> Expression:
    if name == "language":
        codes = tuple(Literal(code.strip()) for code in value.split(","))
        field = Field("language")
        return Compare(field, "==", codes[0]) if len(codes) == 1 else Member(field, codes)
    side, field = name.split("_", 1)
    return Compare(Field(field), _SIGNS[side], Literal(int(value) if float(value).is_integer() else value))
