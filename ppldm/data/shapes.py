"""Aspect-ratio buckets: which shapes the pictures of a run have, and which of them a row gets.

A shape is (height, width) in pixels, of about `--resolution`² in all. A row gets the shape that keeps most of it:
resized until it covers the shape, a picture of W x H keeps min(W h, H w) / max(W h, H w) of its area in a shape of w x
h; of equals it is the larger shape. A row is never enlarged for its shape, unless `enlarge`: then a shape that enlarges
it counts only where no other keeps as much. The rows of a shape with fewer than a group, the rarest first, are assigned
among the other shapes. With `--bucket_random_ratio`, that share of the rows gets one of all shapes that it may have,
each as likely as the others: by seed, part and place in it, so that a row has one shape in all epochs.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isqrt
from pathlib import Path

import numpy as np

from ..config.data import DataOptions
from ..utils.errors import ConfigError
from ..utils.files import atomic_write
from ..utils.rng import Stream, make_rng
from ..utils.text import count_of

Shape = tuple[int, int]  # height, width

BUCKETS_FILE = "buckets.png"  # in a run's folder
_ROW_HEIGHT = 0.28  # inches
NO_SHAPE = 255  # the code of a row that has none
TOO_SMALL, UNKNOWN_SIZE = "too small", "size unknown"
_RATIO_STEP, _STEP = 32, 64  # pixels: those of Stable Cascade's lists of ratios, and of NovelAI's and kohya's of sides
_BLOCK = 2048  # places
_BLOCKS_AT_ONCE = 512  # that a look-up has in memory, a byte a place
_COUNTED_AT_ONCE = 512 * _BLOCK  # places
_ANY = 1e9  # times larger than any picture is made
_DRAWN_AT_ONCE = 1 << 12  # rows, whose every shape is looked at
_ROWS_AT_ONCE = 1 << 16  # assigned at a time: bounds memory, and stays in the processor's cache


@dataclass(frozen=True)
class ShapeRule:
    """What decides which shape a row gets. enlarge: whether rows may be smaller than each shape. group_size: a shape
    with fewer rows is not used. crop_share: of a picture that `--crop_fraction` leaves; each shape cuts it further.
    random_share: of the rows, whose shape is drawn at random by `seed`. max_upscale: by how much `enlarge` may."""

    shapes: tuple[Shape, ...]
    enlarge: bool = False
    group_size: int = 1
    crop_share: float = 1.0
    random_share: float = 0.0
    seed: int = 0
    max_upscale: float = _ANY

    def assign(self, widths: np.ndarray, heights: np.ndarray, part: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(code uint8 [n], kept share of the area float64 [n]) of rows by sides in pixels; NO_SHAPE and 0 for none.
        `part`: the number of their part in the list, by which random shapes are drawn."""
        codes, kept = np.full(len(widths), NO_SHAPE, np.uint8), np.zeros(len(widths))
        by_area = sorted(range(len(self.shapes)), key=lambda code: -self.shapes[code][0] * self.shapes[code][1])
        # Those that enlarge come last and the smallest of them first, so that they win only by what they keep.
        tried = [(code, False) for code in by_area] + [(code, True) for code in by_area[::-1] if self.enlarge]
        for start in range(0, len(widths), _ROWS_AT_ONCE):
            block = slice(start, start + _ROWS_AT_ONCE)
            own_widths, own_heights = np.asarray(widths[block], np.int64), np.asarray(heights[block], np.int64)
            for code, enlarge in tried:
                height, width = self.shapes[code]
                one, other = own_widths * height, own_heights * width
                share = np.minimum(one, other) / np.maximum(np.maximum(one, other), 1)
                better = share > kept[block]
                limit = self.max_upscale if enlarge else 1
                better &= (own_widths * limit >= width) & (own_heights * limit >= height)
                codes[block][better], kept[block][better] = code, share[better]
        if self.random_share:
            draws = make_rng(self.seed, Stream.SHAPE, 0, part).random((len(codes), 2))
            rows = np.flatnonzero((draws[:, 0] < self.random_share) & (codes != NO_SHAPE))
            for start in range(0, len(rows), _DRAWN_AT_ONCE):
                some = rows[start : start + _DRAWN_AT_ONCE]
                sides = np.stack([heights[some], widths[some]], axis=1).astype(np.int64)
                codes[some], kept[some] = self._draw(sides, draws[some, 1])
        return codes, kept

    def _draw(self, sides: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `assign`, of rows that have a shape, by (height, width): any that each may have, by a number of [0, 1)."""
        shapes = np.array(self.shapes)
        may = np.all(sides[:, None] * (self.max_upscale if self.enlarge else 1) >= shapes, axis=2)
        codes = np.argmax(np.cumsum(may, axis=1) > (draws * may.sum(axis=1)).astype(int)[:, None], axis=1)
        across = sides * shapes[codes, ::-1]  # height x the shape's width, width x the shape's height
        return codes, across.min(axis=1) / across.max(axis=1)


@dataclass
class Buckets:
    """The shapes that rows of a selection have. codes: uint8 [selected rows], each row's shape. rows, cut: of each
    shape, how many rows and the mean share of area cut away. merged: shapes that had too few rows, with how many."""

    shapes: list[Shape]
    codes: np.ndarray
    rows: list[int]
    cut: list[float]
    merged: dict[Shape, int] = field(default_factory=dict)

    def report(self) -> dict:
        """JSON-ready."""
        return {
            "shapes": [
                {"width": width, "height": height, "rows": rows, "cut": round(cut, 4)}
                for (height, width), rows, cut in zip(self.shapes, self.rows, self.cut, strict=True)
            ],
            "rows": sum(self.rows),
            "cut": round(float(np.average(self.cut, weights=self.rows)), 4),
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
        """Take away the shapes with too few rows; `rows` are all of these, with their sides. Returns their numbers."""
        shapes, merged = self.rule.shapes, {}
        used = [code for code in range(len(shapes)) if self.counts[code]]
        while len(used) > 1:
            rarest = min(used, key=self.counts.__getitem__)
            if self.counts[rarest] >= self.rule.group_size:
                break
            used.remove(rarest)
            merged[shapes[rarest]] = int(self.counts[rarest])
            moved = np.flatnonzero(self.codes[rows] == rarest)
            others = replace(self.rule, shapes=tuple(shapes[code] for code in used), random_share=0.0)
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


class BucketIndex:
    """The shape of every selected row, the place of the i-th row of a shape, and back, at a byte a row.

    Beside the codes lie the counts of each shape before every block of places. They lead to the block, and the block's
    codes to the place, so that nothing is as long as a list of all places, and a look-up reads one block.

    shapes: (height, width) in pixels of each shape. codes: uint8 [selected rows], the number of a row's shape.
    list_sizes: selected rows of each list. `sizes`: int64 [lists, shapes], how many rows each list has of each shape.
    """

    def __init__(self, shapes: list[tuple[int, int]], codes: np.ndarray, list_sizes: list[int]):
        self.shapes, self.codes = shapes, codes
        num_whole = len(codes) // _BLOCK
        self._whole = codes[: num_whole * _BLOCK].reshape(num_whole, _BLOCK)
        self._last = np.full(_BLOCK, 255, dtype=np.uint8)  # which is no shape's number, there being no more than 255
        self._last[: len(codes) - num_whole * _BLOCK] = codes[num_whole * _BLOCK :]
        self._before = _count_before_blocks(codes, len(shapes))
        self.sizes = self.count_between(np.cumsum([0, *list_sizes]))
        self._before_lists = (np.cumsum(self.sizes, axis=0) - self.sizes).T

    def shape(self, place: int) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.shapes[self.codes[place]]

    def count_between(self, bounds: np.ndarray) -> np.ndarray:
        """Rows of each shape from one of the ascending `bounds` to the next. int64 [bounds - 1, shapes]."""
        before = self._before[:, bounds // _BLOCK].T.copy()
        for counts, place in zip(before, bounds.tolist(), strict=True):
            counts += np.bincount(self.codes[place // _BLOCK * _BLOCK : place], minlength=len(self.shapes))
        return np.diff(before, axis=0)

    def places(self, code: int, indices: np.ndarray, list_number: int = 0) -> np.ndarray:
        """Where the rows of a shape lie, int64 [n]: the indices count them from the first of a list on."""
        indices = indices + self._before_lists[code, list_number]
        found = [
            self._look_up(code, indices[start : start + _BLOCKS_AT_ONCE])
            for start in range(0, len(indices), _BLOCKS_AT_ONCE)
        ]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def index(self, place: int, list_number: int = 0) -> int:
        """How many rows of the shape of `place` lie before it from the first of a list on: the inverse of `places`."""
        code, block = int(self.codes[place]), place // _BLOCK
        in_block = int(np.count_nonzero(self.codes[block * _BLOCK : place] == code))
        return int(self._before[code, block]) + in_block - int(self._before_lists[code, list_number])

    def _look_up(self, code: int, indices: np.ndarray) -> np.ndarray:
        before = self._before[code]
        blocks = np.searchsorted(before, indices, side="right") - 1
        in_whole = blocks < len(self._whole)
        codes = np.empty((len(blocks), _BLOCK), dtype=np.uint8)
        codes[in_whole] = self._whole[blocks[in_whole]]
        codes[~in_whole] = self._last
        found = np.flatnonzero(codes == code)
        firsts = np.searchsorted(found, np.arange(len(blocks)) * _BLOCK)
        return found[firsts + indices - before[blocks]] % _BLOCK + blocks * _BLOCK


def _count_before_blocks(codes: np.ndarray, num_shapes: int) -> np.ndarray:
    """How many places of each shape lie before each block. int64 [shapes, blocks]."""
    counts = np.zeros((num_shapes, len(codes) // _BLOCK + 1), dtype=np.int64)
    for start in range(0, len(codes), _COUNTED_AT_ONCE):
        some = codes[start : start + _COUNTED_AT_ONCE].astype(np.int64)
        some += np.arange(len(some)) // _BLOCK * num_shapes
        num_blocks = -(-len(some) // _BLOCK)
        table = np.bincount(some, minlength=num_blocks * num_shapes).reshape(num_blocks, num_shapes).T
        counts[:, start // _BLOCK : start // _BLOCK + num_blocks] = table
    return np.cumsum(counts, axis=1) - counts


def refusals(codes: np.ndarray, widths: np.ndarray, heights: np.ndarray) -> Counter:
    """Why rows have no shape, by reason."""
    unknown = int(((codes == NO_SHAPE) & ((widths <= 0) | (heights <= 0))).sum())
    return Counter({UNKNOWN_SIZE: unknown, TOO_SMALL: int((codes == NO_SHAPE).sum()) - unknown})


def shape_rule(
    data: DataOptions, batch_size: int, shapes: Iterable[Shape] | None = None, seed: int = 0
) -> ShapeRule | None:
    """What the settings ask for; None without buckets. batch_size: of a device, the default size of a group. shapes: in
    place of the settings', none of them too rare or given at random. seed: of those that are. Raises ConfigError."""
    if (made := make_shapes(data)) is None:
        return None
    usual = {"enlarge": data.bucket_upscale, "crop_share": data.crop_fraction**2}
    usual["max_upscale"] = data.bucket_max_upscale or _ANY
    if shapes is not None:
        return ShapeRule(tuple(shapes), **usual)
    group_size = group_size_of(data, batch_size)
    return ShapeRule(tuple(made), group_size=group_size, random_share=data.bucket_random_ratio, seed=seed, **usual)


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
        least, most = data.bucket_min_side or data.resolution // 2, data.bucket_max_side or 2 * data.resolution
        shapes = shapes_of_steps(data.resolution, data.bucket_step or _STEP, least, most)
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
        try:
            ratio = Fraction(text.replace(":", "/"))
        except (ValueError, ZeroDivisionError):
            ratio = Fraction(0)
        if ratio <= 0:
            raise ConfigError(f"--bucket_ratios {text} is not a ratio of width to height; write it as 2/3")
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


def draw_chart(path: Path, report: dict, skipped: dict[str, int]) -> None:
    """Write a PNG: rows of each shape of a report, tall ones first, darker if more is cut. Raises OutputError."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    shapes = sorted(report["shapes"], key=lambda one: (one["width"] / one["height"], one["width"]))
    names = [f"{one['width']} x {one['height']}" for one in shapes] + [f"not used: {reason}" for reason in skipped]
    rows = [one["rows"] for one in shapes] + list(skipped.values())
    colours = ScalarMappable(Normalize(0, max(0.5, *(one["cut"] for one in shapes))), "Blues")
    figure = Figure(figsize=(9, 1.5 + _ROW_HEIGHT * len(rows)), layout="constrained")
    axis = figure.subplots()
    filled = [colours.to_rgba(one["cut"]) for one in shapes] + ["#bb3333"] * len(skipped)
    bars = axis.barh(names, rows, color=filled, edgecolor="#335577")
    texts = [f"{one['rows']:,}, {one['cut']:.0%} cut away" for one in shapes] + [f"{n:,}" for n in skipped.values()]
    axis.bar_label(bars, texts, padding=4, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_xlabel("rows")
    axis.set_title(f"{report['rows']:,} rows by shape, width x height in pixels; {report['cut']:.1%} of them cut away")
    figure.colorbar(colours, ax=axis, label="share cut away", format=lambda share, _: f"{share:.0%}")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)
