import logging
import pickle
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from math import isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.config.data import DataOptions
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.select.expression import parse_where
from ppldm.data.select.selection import select_rows
from ppldm.data.shapes import (
    NO_SHAPE,
    TOO_SMALL,
    UNKNOWN_SIZE,
    ShapeRule,
    Tally,
    describe,
    make_shapes,
    nearest_to_square,
    parse_shapes,
    refusals,
    shape_rule,
    shapes_of_steps,
)
from ppldm.utils.errors import ConfigError, DataError

# Stable Cascade's training makes these (height, width) at 768 of its list of ratios; and each turned.
CASCADE = [(768, 768), (1056, 512), (1312, 416), (928, 608), (864, 640), (1696, 320), (1184, 480), (960, 576),
           (832, 672), (1856, 288), (832, 672), (1024, 576)]  # fmt: skip


def test_the_shapes_of_ratios_are_those_of_stable_cascade():
    shapes = make_shapes(DataOptions(buckets="ratios", resolution=768))
    assert len(shapes) == 21
    assert set(shapes) == {*CASCADE, *((width, height) for height, width in CASCADE)}


@pytest.mark.parametrize("side", [256, 384, 512, 640, 768, 1024, 1536])
def test_the_shapes_of_ratios_follow_the_published_formula(side):
    """Of each ratio r and 1 / r: the largest multiples of 32 in the roots of side² / r and of side² · r."""
    ratios = [
        Fraction(ratio)
        for ratio in ["1/1", "1/2", "1/3", "2/3", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "9/16"]
    ]
    both = {ratio for one in ratios for ratio in (one, 1 / one)}
    assert len(both) == 23
    expected = {tuple(isqrt(int(side**2 / one)) // 32 * 32 for one in (ratio, 1 / ratio)) for ratio in both}
    assert set(make_shapes(DataOptions(buckets="ratios", resolution=side))) == expected


def test_the_shapes_of_steps_at_512_are_those_of_kohya_s_scripts():
    expected = {256: 1024, 320: 768, 384: 640, 448: 576, 512: 512, 576: 448, 640: 384, 704: 320, 768: 320, 832: 256,
                896: 256, 960: 256, 1024: 256}  # fmt: skip
    both = {*expected.items(), *((height, width) for width, height in expected.items())}
    data = DataOptions(buckets="steps", resolution=512, bucket_min_side=256, bucket_max_side=1024)
    assert set(make_shapes(data)) == both == set(make_shapes(DataOptions(buckets="steps", resolution=512)))


@settings(deadline=None, max_examples=100)
@given(st.integers(16, 2000), st.integers(1, 128), st.integers(1, 2000), st.integers(1, 4000))
def test_shapes_of_steps_keep_to_their_limits(resolution, step, least, most):
    shapes = shapes_of_steps(resolution, step, least, most)
    for height, width in shapes:
        assert not height % step and not width % step and (width, height) in shapes
        assert least <= min(height, width) and max(height, width) <= most and height * width <= resolution**2


@pytest.mark.parametrize("buckets", ["ratios", "steps", "512x512,384x640,1024x256,256x256"])
def test_limits_hold_for_every_list(buckets):
    limits = {"bucket_min_side": 300, "bucket_max_side": 700, "max_aspect_ratio": 1.8}
    shapes = make_shapes(DataOptions(buckets=buckets, resolution=512, **limits))
    assert (512, 512) in shapes and len(set(shapes)) == len(shapes) > 1
    assert all(min(shape) >= 300 and max(shape) <= min(700, 1.8 * min(shape)) for shape in shapes)
    assert set(shapes) < set(make_shapes(DataOptions(buckets=buckets, resolution=512)))


def test_pictures_are_drawn_in_the_shape_nearest_to_a_square():
    assert nearest_to_square([(64, 32), (48, 40), (40, 48), (96, 80), (32, 128)]) == (96, 80)
    assert nearest_to_square([(64, 32), (16, 16)]) == (16, 16)


def test_a_list_is_width_by_height():
    assert parse_shapes("320x192, 256x256") == [(192, 320), (256, 256)]
    assert make_shapes(DataOptions(buckets="64x32,64x32,32x64")) == [(32, 64), (64, 32)]


def test_without_buckets_there_are_no_shapes():
    assert make_shapes(DataOptions()) is None and shape_rule(DataOptions(), 8) is None


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"buckets": "yes"}, "--buckets yes is neither off, ratios, steps nor a list"),
        ({"buckets": "256*256"}, "256x256,320x192"),
        ({"buckets": "ratios", "bucket_ratios": ["2by3"]}, "--bucket_ratios 2by3"),
        ({"buckets": "ratios", "bucket_ratios": ["1/0"]}, "--bucket_ratios 1/0"),
        ({"buckets": "ratios", "bucket_ratios": ["-1/2"]}, "--bucket_ratios -1/2"),
        ({"buckets": "ratios", "bucket_step": 512}, "makes 0 shapes"),
        ({"buckets": "steps", "resolution": 1024, "bucket_step": 4}, "shapes, of 1 to 255"),
        ({"buckets": "64x0"}, "makes 0 shapes"),
    ],
)
def test_what_makes_no_shapes_is_refused(wrong, named):
    with pytest.raises(ConfigError) as caught:
        make_shapes(DataOptions(**wrong))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def kept_share(row, shape):
    one, other = Fraction(row[0] * shape[0]), Fraction(row[1] * shape[1])
    return min(one, other) / max(one, other)


def best_shape(row, shapes, enlarge, limit=10**9):
    """The number of the shape that a row, (width, height), should get, by the words of the module."""
    if min(row) <= 0:
        return NO_SHAPE

    def rank(number):
        shape = shapes[number]
        small, area = row[1] < shape[0] or row[0] < shape[1], shape[0] * shape[1]
        return (kept_share(row, shape), not small, area if not small else -area, -number if not small else number)

    fitting = [n for n, shape in enumerate(shapes) if may_have(row, shape, limit if enlarge else 1)]
    return max(fitting, key=rank) if fitting else NO_SHAPE


def may_have(row, shape, limit) -> bool:
    """Whether a row, (width, height), need not become more than `limit` times larger for a shape."""
    return row[1] * limit >= shape[0] and row[0] * limit >= shape[1]


SIDES = st.integers(1, 12).map(lambda side: 8 * side)
SHAPES = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=40, unique=True)
ROWS = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=150)
@given(ROWS, SHAPES, st.booleans())
def test_a_row_gets_the_shape_that_keeps_most_of_it_and_then_the_larger(rows, shapes, enlarge):
    widths, heights = np.array(rows).T
    codes, kept = ShapeRule(tuple(shapes), enlarge).assign(widths.astype(np.uint16), heights.astype(np.uint16))
    assert codes.dtype == np.uint8
    for row, code, share in zip(rows, codes.tolist(), kept.tolist(), strict=True):
        assert code == best_shape(row, shapes, enlarge)
        assert share == pytest.approx(float(kept_share(row, shapes[code])) if code != NO_SHAPE else 0)
    assert refusals(codes, widths, heights).total() == (codes == NO_SHAPE).sum()


@settings(deadline=None, max_examples=100)
@given(ROWS, SHAPES, st.sampled_from([1.0, 1.25, 2.0, 3.5]))
def test_no_row_becomes_larger_than_it_may(rows, shapes, limit):
    widths, heights = np.array(rows).T
    codes, _ = ShapeRule(tuple(shapes), True, max_upscale=limit).assign(widths, heights)
    assert codes.tolist() == [best_shape(row, shapes, True, limit) for row in rows]
    assert sum(refusals(codes, widths, heights).values()) == (codes == NO_SHAPE).sum()


def test_what_may_not_become_so_large_is_left_out_and_counted(sources):
    sources, sides = sources
    told = [
        select_rows(sources, None, 0, 1, rule_of(bucket_upscale=True, bucket_max_upscale=limit))
        for limit in (None, 2, 1)
    ]
    assert [one.skipped[UNKNOWN_SIZE] for one in told] == [1, 1, 1]
    assert told[0].skipped[TOO_SMALL] == 0 < told[1].skipped[TOO_SMALL] < told[2].skipped[TOO_SMALL]
    assert told[2].skipped == select_rows(sources, None, 0, 1, rule_of()).skipped
    assert [len(one) + one.skipped.total() for one in told] == [len(sides)] * 3


@settings(deadline=None, max_examples=100)
@given(ROWS, SHAPES, st.sampled_from([1, 2, 1e9]), st.integers(0, 9), st.integers(0, 9))
def test_a_random_shape_is_one_that_the_row_may_have_whatever_rows_follow(rows, shapes, limit, seed, part):
    widths, heights = np.array(rows).T
    rule = ShapeRule(tuple(shapes), limit > 1, random_share=0.5, seed=seed, max_upscale=limit)
    codes, kept = rule.assign(widths, heights, part)
    best, _ = replace(rule, random_share=0.0).assign(widths, heights)
    assert ((codes == NO_SHAPE) == (best == NO_SHAPE)).all()
    for row, code, share in zip(rows, codes.tolist(), kept.tolist(), strict=True):
        if code != NO_SHAPE:
            assert may_have(row, shapes[code], limit) and share == pytest.approx(float(kept_share(row, shapes[code])))
    first = len(rows) // 2
    assert (rule.assign(widths[:first], heights[:first], part)[0] == codes[:first]).all()


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_about_that_share_of_the_rows_has_a_random_shape_each_as_often(share):
    shapes, n = ((64, 64), (64, 96), (96, 64), (64, 128)), 20_000
    rule = ShapeRule(shapes, random_share=share, seed=3)
    codes = {(seed, part): replace(rule, seed=seed).assign(np.full(n, 300), np.full(n, 300), part)[0]
             for seed in (3, 4) for part in (0, 1)}  # fmt: skip
    for found in codes.values():
        counts = np.bincount(found, minlength=4)  # squares' best shape is the first
        assert counts[1:] == pytest.approx(n * share / 4, abs=5 * (n * share / 4) ** 0.5)
    others = [found != 0 for found in codes.values()]
    assert all((a == b).mean() < 1 - share / 4 for a, b in combinations(others, 2))


def test_random_shapes_are_not_for_rows_that_are_held_out_and_not_for_cached_latents():
    data = DataOptions(buckets="ratios", resolution=64, bucket_step=8, bucket_random_ratio=0.3)
    assert (shape_rule(data, 4, seed=7).random_share, shape_rule(data, 4, seed=7).seed) == (0.3, 7)
    assert shape_rule(data, 4, [(64, 32)], seed=7).random_share == 0
    for more in ({"bucket_random_ratio": 0.3}, {"bucket_upscale": True, "bucket_max_upscale": 2.0}):
        with pytest.raises(ConfigError, match="--latents cached is of each row's best shape"):
            DataOptions(buckets="ratios", latents="cached", random_crop=False, **more).check()


def test_rows_that_several_blocks_hold_are_assigned_alike():
    rule = shape_rule(DataOptions(buckets="ratios", resolution=64, bucket_step=8), 1)
    widths, heights = np.random.default_rng(0).integers(50, 300, (2, 150_000))
    codes, kept = rule.assign(widths, heights)
    for start in (0, 65_530, 149_990):
        block = slice(start, start + 10)
        again = rule.assign(widths[block], heights[block])
        assert (codes[block] == again[0]).all() and (kept[block] == again[1]).all()


@settings(deadline=None, max_examples=150)
@given(ROWS, SHAPES, st.booleans(), st.integers(1, 20))
def test_after_merging_every_row_has_its_best_shape_of_those_that_remain(rows, shapes, enlarge, group_size):
    widths, heights = np.array(rows).T
    rule = ShapeRule(tuple(shapes), enlarge, group_size)
    tally = Tally(rule, len(rows))
    before, kept = rule.assign(widths, heights)
    tally.add(slice(0, len(rows)), before, kept)
    rare = tally.rare_rows()
    merged = tally.merge(rare, widths[rare], heights[rare])
    buckets = tally.buckets(merged)
    used = Counter(before[before != NO_SHAPE].tolist())
    assert len(buckets.shapes) == min(1, len(used)) or min(buckets.rows) >= group_size
    assert {*buckets.shapes, *merged} == {shapes[code] for code in used} and not {*buckets.shapes} & {*merged}
    again, kept = ShapeRule(tuple(buckets.shapes), enlarge).assign(widths, heights)
    assert (again[again != NO_SHAPE] == buckets.codes).all() and (tally.codes == NO_SHAPE).tolist() == (
        again == NO_SHAPE
    ).tolist()
    assert buckets.rows == np.bincount(buckets.codes, minlength=len(buckets.shapes)).tolist()
    for code, cut in enumerate(buckets.cut):
        assert cut == pytest.approx(1 - kept[again == code].mean())


@pytest.fixture
def sources(tmp_path, make_image):
    """Two parts in two lists: every width and height of 10 to 60 pixels by 5, a row of unknown size, one of 7 x 7."""
    image = make_image()
    sides = [*product(range(10, 65, 5), repeat=2), (0, 0), (7, 7)]
    rows = [
        Row(f"picture {i}", image if w else b"no image", {"width": w, "height": h, "n": i} if w else {"n": i})
        for i, (w, h) in enumerate(sides)
    ]
    write_part(tmp_path / "a.gz", rows[:50])
    write_part(tmp_path / "b.gz", rows[50:])
    for name in "ab":
        write_filelist(tmp_path / f"{name}.filelist", [f"{name}.gz"])
    write_filelist(tmp_path / "l.list", ["a.filelist", "b.filelist"])
    return read_sources(tmp_path / "l.list"), sides


def rule_of(group_size=1, **more):
    data = DataOptions(buckets="ratios", resolution=24, bucket_step=4, crop_fraction=1.0, **more)
    return shape_rule(data, group_size)


@pytest.mark.parametrize("group_size", [1, 6, 1000])
@pytest.mark.parametrize("enlarge", [False, True])
def test_a_selection_knows_the_shape_of_each_of_its_rows(sources, group_size, enlarge):
    sources, sides = sources
    selection = select_rows(sources, None, 0, 1, rule_of(group_size, bucket_upscale=enlarge))
    shapes, codes = selection.buckets.shapes, selection.buckets.codes
    rows = [selection[place] for place in range(len(selection))]
    expected = {row: best_shape(size, shapes, enlarge) for row, size in enumerate(sides)}
    assert rows == [row for row, code in expected.items() if code != NO_SHAPE]
    assert codes.dtype == np.uint8 and codes.tolist() == [expected[row] for row in rows]
    assert len(shapes) == 1 if group_size == 1000 else len(shapes) > 5
    assert len(selection) + selection.skipped.total() == len(sides) == selection.num_rows
    assert selection.skipped[UNKNOWN_SIZE] == 1 and (selection.skipped[TOO_SMALL] > 0) != enlarge
    assert sum(selection.list_sizes) == len(selection)


def test_a_condition_holds_beside_shapes_and_the_report_counts_used_rows_only(sources):
    sources, sides = sources
    rule = pickle.loads(pickle.dumps(rule_of()))
    selection = pickle.loads(pickle.dumps(select_rows(sources, parse_where("n >= 40 and width != 20"), 0, 1, rule)))
    rows = [selection[place] for place in range(len(selection))]
    everything = select_rows(sources, None, 0, 1, rule_of())
    shape_of = dict(zip(map(everything.__getitem__, range(len(everything))), everything.buckets.codes, strict=True))
    assert rows == [row for row in shape_of if row >= 40 and sides[row][0] != 20]
    shapes = [selection.buckets.shapes[code] for code in selection.buckets.codes]
    assert shapes == [everything.buckets.shapes[shape_of[row]] for row in rows]
    assert len(selection) + selection.skipped.total() == len(sides)
    report = selection.buckets.report()
    assert report["rows"] == len(rows) == sum(one["rows"] for one in report["shapes"])
    lost = [1 - kept_share(sides[row], shape) for row, shape in zip(rows, shapes, strict=True)]
    assert report["cut"] == pytest.approx(float(sum(lost)) / len(lost), abs=1e-4)


def test_the_log_has_a_table_of_shapes_and_names_those_that_were_merged(sources, caplog):
    with caplog.at_level(logging.INFO, "ppldm"):
        selection = select_rows(sources[0], None, 0, 1, rule_of(6))
        selection.log()
    text = " ".join(caplog.text.split())
    for one in selection.buckets.report()["shapes"]:
        assert "{width} x {height} {rows}".format(**one) in text
    assert selection.buckets.merged and "merged into others, having fewer rows than a group:" in text
    for (height, width), rows in selection.buckets.merged.items():
        assert f"{width}x{height} ({rows} row" in text


def test_the_crop_fraction_is_part_of_what_is_cut_away():
    rule = shape_rule(DataOptions(buckets="64x64", crop_fraction=0.5), 1)
    tally = Tally(rule, 2)
    tally.add(slice(0, 2), *rule.assign(np.array([64, 128]), np.array([64, 64])))
    assert tally.buckets({}).cut == [pytest.approx(1 - 0.25 * 0.75)]
    assert describe(tally.buckets({}).report())[1].split() == ["64", "x", "64", "2", "100.0%", "81.2%"]


def test_held_out_rows_take_the_shapes_of_those_trained_on_and_none_is_merged():
    rule = shape_rule(DataOptions(buckets="ratios", bucket_group_size=9), 4, [(64, 32)])
    assert rule.shapes == ((64, 32),) and rule.group_size == 1
    assert shape_rule(DataOptions(buckets="ratios", bucket_group_size=9), 4).group_size == 9
    assert shape_rule(DataOptions(buckets="ratios"), 4).group_size == 4


def test_no_row_that_fills_a_shape_is_an_error(sources):
    with pytest.raises(DataError, match="images need to fill a shape.*--buckets"):
        select_rows(sources[0], None, 0, 1, shape_rule(DataOptions(buckets="512x512"), 1))
