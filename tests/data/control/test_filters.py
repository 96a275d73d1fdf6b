"""Filters of control images: pure functions of a crop and of draws, of the size of the crop."""

import sys

import numpy as np
import pytest

from ppldm.data.control import FILTERS, apply_filter, make_filter, to_picture, with_hole
from ppldm.utils.errors import ConfigError
from ppldm.utils.rng import Stream, make_rng

MADE = sorted(set(FILTERS) - {"row"})


def picture(height=64, width=48, seed=0):
    """Blocks of colour, with edges and flat places."""
    blocks = np.random.default_rng(seed).integers(0, 256, (3, height // 16, width // 16), dtype=np.uint8)
    return blocks.repeat(16, axis=1).repeat(16, axis=2)


def draws(row=0, seed=1):
    return make_rng(seed, Stream.CONTROL, row=row)


@pytest.mark.parametrize("size", [(64, 48), (16, 16), (32, 320)])
@pytest.mark.parametrize("name", MADE)
def test_a_control_image_is_as_large_as_its_picture_and_depends_on_nothing_else(name, size):
    seen, made_by = picture(*size), make_filter(name)
    before = seen.copy()
    one, other = (apply_filter(made_by, seen, draws()) for _ in range(2))
    assert one.shape == (made_by.num_channels, *size) and one.dtype == np.uint8
    assert (one == other).all() and (seen == before).all()
    assert to_picture(one).shape == (*size, 3)


def test_edges_by_canny_are_those_of_opencv():
    import cv2

    seen = picture()
    made = apply_filter(make_filter("canny,resize=0"), seen, draws())
    assert (made == cv2.Canny(np.ascontiguousarray(seen.transpose(1, 2, 0)), 100, 200)).all() and made.any()
    single = make_filter("canny,channels=1,resize=0")
    assert single.num_channels == 1 and np.array_equal(apply_filter(single, seen, draws()), made[:1])
    large = picture(512, 448)
    coarse = apply_filter(make_filter("canny"), large, draws())
    shrunk = cv2.resize(np.ascontiguousarray(large.transpose(1, 2, 0)), (224, 256), interpolation=cv2.INTER_AREA)
    edges = cv2.Canny(shrunk, 100, 200)
    assert (coarse[0] == edges.repeat(2, axis=0).repeat(2, axis=1)).all()


def test_what_each_filter_leaves_of_a_picture():
    seen = picture()
    flat = np.full_like(seen, 77)
    for name in ("grey", "blur", "tiles", "super-resolution"):
        assert (apply_filter(make_filter(name), flat, draws()) == 77).all(), name
    for name in ("canny", "edges"):
        assert not apply_filter(make_filter(name), flat, draws()).any(), name
    assert (apply_filter(make_filter("tiles,side=16"), seen, draws()) == seen).all()
    small = apply_filter(make_filter("super-resolution,scale=0.5"), seen, draws())
    assert 0 < np.abs(small.astype(int) - seen).mean() < 20
    light = 0.299 * seen[0] + 0.587 * seen[1] + 0.114 * seen[2]
    assert np.abs(apply_filter(make_filter("grey"), seen, draws())[1] - light).max() <= 1


@pytest.mark.parametrize("row", range(8))
def test_a_hole_is_black_and_the_rest_is_the_picture(row):
    seen = picture(seed=row)
    made = apply_filter(make_filter("inpainting"), seen, draws(row))
    hole = made[3] == 255
    assert set(np.unique(made[3])) <= {0, 255} and hole.any() and not hole.all()
    assert (made == with_hole(seen, hole)).all()
    assert not made[:3, hole].any() and (made[:3, ~hole] == seen[:, ~hole]).all()


def test_a_higher_threshold_makes_a_smaller_hole_and_outpainting_takes_all_the_rest():
    seen = picture()
    holes = [
        apply_filter(make_filter(f"inpainting,threshold_low={one},threshold_high={one},p_outpaint={p}"), seen, draws())[
            3
        ]
        for one in (0.04, 0.2, 0.4)
        for p in (0, 1)
    ]
    inside, outside = holes[::2], holes[1::2]
    assert all(
        (large >= small).all() and (large > small).any() for large, small in zip(inside, inside[1:], strict=False)
    )
    assert all((one + other == 255).all() for one, other in zip(inside, outside, strict=True))


def test_thresholds_are_drawn_from_their_range_and_four_in_ten_are_outside():
    seen, made_by = picture(), make_filter("inpainting")
    least, most = (
        apply_filter(make_filter(f"inpainting,threshold_low={one},threshold_high={one},p_outpaint=0"), seen, draws())[3]
        for one in (0.4, 0.04)
    )
    holes = [apply_filter(made_by, seen, draws(row))[3] for row in range(300)]
    corner = most == 0  # in no hole that is inside
    outside = [bool(hole[corner].all()) for hole in holes]
    assert 0.32 < np.mean(outside) < 0.48
    for hole, is_outside in zip(holes, outside, strict=True):
        own = 255 - hole if is_outside else hole
        assert (own >= least).all() and (own <= most).all()
    assert len({hole.tobytes() for hole in holes}) > 100


class Negative:
    def __init__(self, strength=1):
        self.num_channels, self.strength = 3, strength

    def __call__(self, picture, generator):
        return (255 - picture) // self.strength


class Wrong:
    num_channels = 1

    def __call__(self, picture, generator):
        return picture


class Broken:
    num_channels = 3

    def __call__(self, picture, generator):
        raise KeyError("colour")


def test_a_class_of_ones_own_is_a_filter_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "negatives_of_mine.py").write_text(
        "class Negative:\n    num_channels = 3\n    def __init__(self, top=255):\n        self.top = top\n"
        "    def __call__(self, picture, generator):\n        return self.top - picture\n"
    )
    monkeypatch.chdir(tmp_path)
    seen = picture()
    assert (apply_filter(make_filter("negatives_of_mine:Negative,top=255"), seen, draws()) == 255 - seen).all()
    sys.modules["my_filters"] = sys.modules[__name__]
    assert (apply_filter(make_filter("my_filters:Negative,strength=5"), seen, draws()) == (255 - seen) // 5).all()
    with pytest.raises(
        ConfigError, match=r"the control filter Wrong gave uint8 \[3, 64, 48\]; uint8 \[1, 64, 48\] is due"
    ):
        apply_filter(make_filter("my_filters:Wrong"), seen, draws())
    with pytest.raises(ConfigError, match="the control filter Broken failed: KeyError: 'colour'"):
        apply_filter(make_filter("my_filters:Broken"), seen, draws())


@pytest.mark.parametrize(
    "spec, said",
    [
        ("cany", "no filter 'cany'; did you mean canny"),
        ("canny,lo=3", "no parameter 'lo'; known: low, high, resize"),
        ("row,side=3", "no parameter 'side'; known: it has none"),
        ("canny,low", "NAME=VALUE"),
        ("canny,low=x", "low 'x' must be a number"),
        ("canny,low=300", "high 200 must be at least low, 300"),
        ("blur,sigma=0", "sigma 0 must be above 0"),
        ("super-resolution,scale=1", "scale 1 must be above 0 and below 1"),
        ("inpainting,threshold_high=0.01", "threshold_high 0.01 must be from threshold_low to 1"),
        ("inpainting,p_outpaint=2", "p_outpaint 2 must be from 0 to 1"),
        ("nowhere_at_all:X", "No module named 'nowhere_at_all'"),
        ("os:getcwd", "needs num_channels"),
        ("pathlib:Path,side=3", "TypeError|needs num_channels"),
    ],
)
def test_what_is_no_filter_is_refused_with_what_is_known(spec, said):
    with pytest.raises(ConfigError, match=said):
        make_filter(spec)
