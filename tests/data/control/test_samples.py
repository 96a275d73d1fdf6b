"""The control image of a sample is of its very crop, mirrored or not, and drawn by seed, epoch and row alone."""

import io

import numpy as np
import pytest
from PIL import Image

from ppldm.data.control import apply_filter, make_filter
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.layouts import LAYOUTS
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import BadRows, Row, decode_row, encode_row
from ppldm.utils.errors import RowError
from ppldm.utils.rng import Stream, make_rng

CROPS = [{}, {"flip": True}, {"random": False, "fraction": 1.0}, {"random": False, "smart": True}, {"num_crops": 2}]
KEYS = [(epoch, place) for epoch in range(2) for place in range(24)]


@pytest.mark.parametrize("crops", CROPS)
@pytest.mark.parametrize("spec", ["canny,resize=0", "inpainting"])
def test_it_is_made_of_the_pixels_of_its_sample(make_dataset, spec, crops):
    made = make_dataset(inputs={"control": spec}, crops=crops).make_batch(KEYS)
    plain = make_dataset(crops=crops).make_batch(KEYS)
    assert made.keys() == plain.keys() | {"control"}
    assert all(np.array_equal(made[name], plain[name]) for name in plain.keys() - {"checksums"})
    for (epoch, place), pixels, control in zip(KEYS, made["pixel_values"], made["control"], strict=True):
        draws = make_rng(7, Stream.CONTROL, epoch, place)
        assert np.array_equal(control, apply_filter(make_filter(spec), pixels, draws))


def test_it_does_not_depend_on_what_else_is_in_the_batch(make_dataset):
    dataset = make_dataset(inputs={"control": "inpainting"})
    whole = dataset.make_batch(KEYS)["control"]
    assert all(np.array_equal(dataset[key]["control"], one) for key, one in zip(KEYS, whole, strict=True))
    assert not np.array_equal(whole[:24, 3], whole[24:, 3])  # another epoch draws other holes


def encode(pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_pairs(tmp_path, seconds, layout="control"):
    """Rows of 40 x 30 pictures, each with its second image."""
    rng = np.random.default_rng(0)
    first = [rng.integers(0, 256, (30, 40, 3), dtype=np.uint8) for _ in seconds]
    rows = [
        Row(f"picture {n}", encode(one), {}, (), make(one))
        for n, (one, make) in enumerate(zip(first, seconds, strict=True))
    ]
    write_part(tmp_path / "a.gz", rows)
    write_filelist(tmp_path / "a.filelist", ["a.gz"])
    (tmp_path / "a.list").write_text(f"a.filelist layout={layout}\n")
    return read_sources(tmp_path / "a.list")


@pytest.mark.parametrize("crops", CROPS)
def test_the_second_image_of_a_row_is_cut_as_the_first(tmp_path, make_dataset, crops):
    sources = write_pairs(
        tmp_path, [encode, lambda one: encode(255 - one), lambda one: encode(one.repeat(2, 0).repeat(2, 1))]
    )
    batch = make_dataset(sources, crops=crops, inputs={"control": "row"}).make_batch(
        [(e, p) for e in range(8) for p in range(3)]
    )
    pixels, control = (batch[name].astype(int) for name in ("pixel_values", "control"))
    assert np.array_equal(control[::3], pixels[::3])
    assert np.abs(255 - control[1::3] - pixels[1::3]).max() <= 1  # rounding
    assert np.abs(control[2::3] - pixels[2::3]).mean() < 12 and not batch["skipped"]


@pytest.mark.parametrize(
    "second, layout, said",
    [
        (lambda one: encode(one[:20]), "control", "another shape than 40 x 30"),
        (lambda one: b"no image", "control", "image"),
        (encode, "default", "say layout=control"),
    ],
)
def test_a_row_without_a_fitting_second_image_is_a_bad_one(tmp_path, make_dataset, second, layout, said):
    sources = write_pairs(tmp_path, [second, encode], layout)
    dataset = make_dataset(sources, inputs={"control": "row"}, bad_rows=BadRows("raise"))
    with pytest.raises(Exception, match=said):
        dataset.make_batch([(0, 0)])


def test_a_line_keeps_its_second_image(make_image):
    row = Row("a dog", make_image(1), {"key": "1"}, (), make_image(2))
    assert decode_row(encode_row(row), "", LAYOUTS["control"]) == row
    assert decode_row(encode_row(row), "").image == row.image  # and is read without it
    with pytest.raises(RowError, match="3 tab-separated"):
        decode_row(encode_row(Row("a dog", make_image(1))), "", LAYOUTS["control"])
