"""Aspect-ratio buckets: which shapes the pictures of a run have, and which of them a row gets. Pure; numpy only.

A shape is (height, width) in pixels. `make_shapes` lists those that the settings ask for, each of about
`--resolution`² pixels. A row gets the shape that keeps most of it: resized until it covers the shape, a picture of
W x H keeps min(W h, H w) / max(W h, H w) of its area in a shape of w x h. Of equals it is the larger shape. A row is
never enlarged for its shape, unless `enlarge`: then a shape that enlarges it counts only where no other keeps as much.
What is assigned depends on nothing but the row's size in the index, and the shapes.

A shape with fewer rows than a group is taken off the list, the rarest first, and its rows are assigned among the
others. So with the shapes that remain, every row has the one that `assign` gives it.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isqrt

import numpy as np

from ..config.data import DataOptions
from ..utils.errors import ConfigError
from ..utils.text import count_of

Shape = tuple[int, int]  # height, width

NO_SHAPE = 255  # the code of a row that has none
TOO_SMALL, UNKNOWN_SIZE = "too small", "size unknown"
_RATIO_STEP, _STEP = 32, 64  # pixels: those of Stable Cascade's lists of ratios, and of NovelAI's and kohya's of sides
_ROWS_AT_ONCE = 1 << 16  # assigned at a time: bounds memory, and stays in the processor's cache


@dataclass(frozen=True)
class ShapeRule:
    """What decides which shape a row gets.

    enlarge: whether rows may be that are smaller than each shape. group_size: a shape with fewer rows is not used.
    crop_share: of a picture that `--crop_fraction` leaves; each shape cuts it further.
    """

    shapes: tuple[Shape, ...]
    enlarge: bool = False
    group_size: int = 1
    crop_share: float = 1.0

    def assign(self, widths: np.ndarray, heights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(code uint8 [n], kept share of its area float64 [n]) of rows by their sides in pixels; NO_SHAPE and 0 where
        no shape will do."""
        codes = np.full(len(widths), NO_SHAPE, np.uint8)
        kept = np.zeros(len(widths))
        for start in range(0, len(widths), _ROWS_AT_ONCE):
            block = slice(start, start + _ROWS_AT_ONCE)
            self._assign_block(  # type: ignore[call-arg]
                *(np.asarray(sides[block], np.int64) for sides in (widths, heights)), codes[block], kept[block]
            )
        return codes, kept

    def _assign_block(self, widths, heights, codes, kept) -> None:
        by_area = sorted(range(len(self.shapes)), key=lambda code: -self.shapes[code][0] * self.shapes[code][1])
        # Those that enlarge come last and the smallest of them first, so that they win only by what they keep.
        for code, enlarge in [(code, False) for code in by_area] + [(code, True) for code in by_area[::-1]]:
            if enlarge and not self.enlarge:
                break
            height, width = self.shapes[code]
            one, other = widths * height, heights * width
            share = np.minimum(one, other) / np.maximum(np.maximum(one, other), 1)
            better = share > kept
            if not enlarge:
                better &= (widths >= width) & (heights >= height)
            codes[better], kept[better] = code, share[better]


@dataclass
class Buckets:
    """The shapes of a selection's rows. Those without rows are left out.

    codes: uint8 [selected rows], the number of each row's shape. rows, cut: of each shape, how many rows and the mean
    share of their area that is cut away. merged: shapes that had too few rows, with how many.
    """

    shapes: list[Shape]
    codes: np.ndarray
    rows: list[int]
    cut: list[float]
    merged: dict[Shape, int] = field(default_factory=dict)

    @property
    def mean_cut(self) -> float:
        """The share of their area that all rows lose, on average."""
        return float(np.average(self.cut, weights=self.rows))

    def report(self) -> dict:
        """JSON-ready."""
        return {
            "shapes": [
                {"width": width, "height": height, "rows": rows, "cut": round(cut, 4)}
                for (height, width), rows, cut in zip(self.shapes, self.rows, self.cut, strict=True)
            ],
            "rows": sum(self.rows),
            "cut": round(self.mean_cut, 4),
            "merged": {f"{width}x{height}": rows for (height, width), rows in self.merged.items()},
        }


def describe(report: dict) -> list[str]:
    """A report as lines of a table."""
    lines = [f"  {'width x height':<16} {'rows':>12} {'share':>8} {'cut away':>9}"]
    lines += [
        f"  {'{width} x {height}'.format(**one):<16} {one['rows']:>12,} {one['rows'] / report['rows']:>8.1%} "
        f"{one['cut']:>9.1%}"
        for one in report["shapes"]
    ]
    lines.append(f"  {'all':<16} {report['rows']:>12,} {1:>8.0%} {report['cut']:>9.1%}")
    if report["merged"]:
        merged = ", ".join(f"{shape} ({count_of(rows, 'row')})" for shape, rows in report["merged"].items())
        lines.append(f"  merged into others, having fewer rows than a group: {merged}")
    return lines


class Tally:
    """What is known of the shapes of a selection while its parts are judged: codes of all rows, rows and kept area."""

    def __init__(self, rule: ShapeRule, num_rows: int):
        self.rule = rule
        self.codes = np.full(num_rows, NO_SHAPE, np.uint8)
        self.counts = np.zeros(NO_SHAPE + 1, np.int64)
        self.kept = np.zeros(NO_SHAPE + 1)

    def add(self, rows: slice | np.ndarray, codes: np.ndarray, kept: np.ndarray) -> None:
        """Rows get their codes; `kept`: of each."""
        self.codes[rows] = codes
        self.counts += np.bincount(codes, minlength=NO_SHAPE + 1)
        self.kept += np.bincount(codes, kept, minlength=NO_SHAPE + 1)

    def rare_rows(self) -> np.ndarray:
        """The rows, ascending, whose shapes have too few of them."""
        rare = (self.counts > 0) & (self.counts < self.rule.group_size)
        rare[NO_SHAPE] = False
        return np.flatnonzero(rare[self.codes])

    def merge(self, rows: np.ndarray, widths: np.ndarray, heights: np.ndarray) -> dict[Shape, int]:
        """Take away the shapes with too few rows; `rows` are all of these, with their sides. Those shapes, with how
        many rows they had."""
        shapes, merged = self.rule.shapes, {}
        used = [code for code in range(len(shapes)) if self.counts[code]]
        while len(used) > 1:
            rarest = min(used, key=self.counts.__getitem__)
            if self.counts[rarest] >= self.rule.group_size:
                break
            used.remove(rarest)
            merged[shapes[rarest]] = int(self.counts[rarest])
            moved = np.flatnonzero(self.codes[rows] == rarest)
            others = replace(self.rule, shapes=tuple(shapes[code] for code in used))
            codes, kept = others.assign(widths[moved], heights[moved])
            self.counts[rarest] = self.kept[rarest] = 0
            self.add(rows[moved], np.append(np.array(used, np.uint8), [NO_SHAPE] * (256 - len(used)))[codes], kept)
        return merged

    def buckets(self, merged: dict[Shape, int]) -> Buckets:
        """Of the rows that have a shape."""
        used = np.flatnonzero(self.counts[:NO_SHAPE])
        renumbered = np.zeros(NO_SHAPE + 1, np.uint8)
        renumbered[used] = np.arange(len(used))
        cut = 1 - self.kept[used] / self.counts[used] * self.rule.crop_share
        return Buckets(
            [self.rule.shapes[code] for code in used],
            renumbered[self.codes[self.codes != NO_SHAPE]],
            self.counts[used].tolist(),
            cut.tolist(),
            merged,
        )


def refusals(codes: np.ndarray, widths: np.ndarray, heights: np.ndarray) -> Counter:
    """Why rows have no shape, by reason."""
    unknown = int(((codes == NO_SHAPE) & ((widths <= 0) | (heights <= 0))).sum())
    return Counter({UNKNOWN_SIZE: unknown, TOO_SMALL: int((codes == NO_SHAPE).sum()) - unknown})


def shape_rule(data: DataOptions, batch_size: int, shapes: Iterable[Shape] | None = None) -> ShapeRule | None:
    """What the settings ask for; None without buckets. batch_size: of a device, the default size of a group. shapes: in
    place of the settings', and none of them too rare. Raises ConfigError."""
    if (made := make_shapes(data)) is None:
        return None
    group_size = 1 if shapes is not None else group_size_of(data, batch_size)
    return ShapeRule(tuple(made if shapes is None else shapes), data.bucket_upscale, group_size, data.crop_fraction**2)


def group_size_of(data: DataOptions, batch_size: int) -> int:
    """The rows of a group of one shape. batch_size: of a device."""
    return data.bucket_group_size or batch_size


def make_shapes(data: DataOptions) -> list[Shape] | None:
    """The shapes that the settings ask for, each once; None without buckets. Raises ConfigError."""
    if data.buckets == "off":
        return None
    if data.buckets == "ratios":
        shapes = shapes_of_ratios(data.resolution, data.bucket_ratios, data.bucket_step or _RATIO_STEP)
    elif data.buckets == "steps":
        step = data.bucket_step or _STEP
        least, most = data.bucket_min_side or data.resolution // 2, data.bucket_max_side or 2 * data.resolution
        shapes = shapes_of_steps(data.resolution, step, least, most)
    else:
        shapes = parse_shapes(data.buckets)
    least, most = data.bucket_min_side or 1, data.bucket_max_side or float("inf")
    shapes = [
        shape
        for shape in dict.fromkeys(shapes)
        if least <= min(shape) and max(shape) <= most and max(shape) <= (data.max_aspect_ratio or most) * min(shape)
    ]
    if not 0 < len(shapes) <= NO_SHAPE:
        raise ConfigError(
            f"--buckets {data.buckets} makes {len(shapes)} shapes, of 1 to {NO_SHAPE} that there may be; change "
            "--bucket_step, --bucket_min_side, --bucket_max_side or --max_aspect_ratio"
        )
    return shapes


def shapes_of_ratios(resolution: int, ratios: Iterable[str], step: int) -> list[Shape]:
    """For each ratio r of width to height, and for 1 / r: floor(sqrt(d / r) / step) step by floor(sqrt(d r) / step)
    step pixels, d = resolution². As Stable Cascade's training does (its Bucketeer). Raises ConfigError."""
    area, shapes = resolution**2, []
    for text in ratios:
        ratio = _parse_ratio(text)
        # floor(sqrt(x)) is isqrt(floor(x)), and floor(floor(x) / step) is floor(x / step).
        long, short = (isqrt(int(area * one)) // step * step for one in (1 / ratio, ratio))
        shapes += [(long, short), (short, long)]
    return shapes


def shapes_of_steps(resolution: int, step: int, least: int, most: int) -> list[Shape]:
    """For each width of whole steps from `least` to `most` pixels the greatest height of whole steps, up to `most`, of
    no more than resolution² pixels in all; and the same turned. As NovelAI published, and kohya's scripts do."""
    low, high = -(-least // step) * step, most // step * step
    square = resolution // step * step
    shapes = [(square, square)] if low <= square <= high else []
    for width in range(max(low, step), high + 1, step):
        height = min(resolution**2 // width // step * step, high)
        if height >= low:
            shapes += [(height, width), (width, height)]
    return shapes


def parse_shapes(text: str) -> list[Shape]:
    """The shapes of a list of width x height, as 256x256,320x192. Raises ConfigError."""
    found = [re.fullmatch(r"(\d+)x(\d+)", word.strip()) for word in text.split(",")]
    if not all(found):
        raise ConfigError(
            f"--buckets {text} is neither off, ratios, steps nor a list of width x height; write it as 256x256,320x192"
        )
    return [(int(one[2]), int(one[1])) for one in found]


def nearest_to_square(shapes: Iterable[Shape]) -> Shape:
    """Of equals the largest."""
    return min(shapes, key=lambda shape: (Fraction(max(shape), min(shape)), -shape[0] * shape[1]))


def _parse_ratio(text: str) -> Fraction:
    try:
        ratio = Fraction(text.replace(":", "/"))
    except (ValueError, ZeroDivisionError):
        ratio = Fraction(0)
    if ratio <= 0:
        raise ConfigError(f"--bucket_ratios {text} is not a ratio of width to height; write it as 2/3")
    return ratio
