"""The file of cached latents gives back what was written, says what is missing or bad, and never a wrong number."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.config.data import LATENTS_DTYPES
from ppldm.data.cached.file import (
    REASONS,
    Latents,
    cached_path,
    count_bytes,
    create_file,
    decode_array,
    encode_array,
    encode_texts,
    find_cached,
    read_key,
    read_texts,
)
from ppldm.data.cached.key import LatentsKey
from ppldm.data.filelist import Source
from ppldm.data.formats.open import open_part
from ppldm.data.formats.part import Part, write_part
from ppldm.data.formats.row import Row
from ppldm.data.images import CropRule
from ppldm.data.shapes import NO_SHAPE
from ppldm.utils.errors import PartError, RowError

C, F = 4, 8
SHAPES = [(16, 16), (24, 16), (8, 32)]


def make_key(dtype="float16", crops=CropRule(random=False), shapes=SHAPES, part=(100, 7), autoencoder="0123"):  # noqa: B008
    return LatentsKey.of(autoencoder, shapes, crops, dtype).of_part(Source(Path("x.filelist"), ()), part)


def make_file(folder, key, codes, name="part-0.gz", texts=None) -> Path:
    path = cached_path(folder / name, key)
    codes = np.array(codes, np.uint8)
    sizes = np.array([np.arange(len(codes)) + 20, np.arange(len(codes)) + 30], np.uint16)
    texts = [encode_texts([f"row {i}"], {"n": i}) for i in range(len(codes))] if texts is None else texts
    create_file(path, key, {"channels": C, "factor": F}, codes, sizes, texts)
    return path


def draw_moments(rng, key, code):
    height, width = key.shapes[code]
    return rng.normal(size=(2, C, height // F, width // F)).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_what_is_written_is_read_and_all_else_is_missing(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from(LATENTS_DTYPES))
    crops = data.draw(
        st.sampled_from([CropRule(random=False), CropRule(num_crops=3), CropRule(num_crops=2, flip=True)])
    )
    codes = data.draw(st.lists(st.sampled_from([0, 1, 2, NO_SHAPE]), min_size=1, max_size=12))
    key, rng = make_key(dtype, crops), np.random.default_rng(data.draw(st.integers(0, 99)))
    path = make_file(tmp_path_factory.mktemp("latents"), key, codes)
    latents, kept = Latents(path, key, writable=True), {}
    cells = [(row, v) for row, code in enumerate(codes) if code != NO_SHAPE for v in range(crops.num_variants)]
    for row, variant in data.draw(st.lists(st.sampled_from(cells), max_size=20)) if cells else []:
        moments = draw_moments(rng, key, codes[row])
        kept[row, variant] = latents.write(row, variant, moments)
        assert np.allclose(
            kept[row, variant], moments, rtol={"float16": 1e-3, "bfloat16": 8e-3, "float32": 0}[dtype], atol=1e-4
        )
    again = Latents(path, key)
    assert len(again) == len(codes) and [again.shape(row) for row in range(len(codes))] == [
        None if code == NO_SHAPE else key.shapes[code] for code in codes
    ]
    for row, variant in cells:
        for opened in (latents, again):
            found, wanted = opened.read(row, variant), kept.get((row, variant))
            assert (found is None) if wanted is None else (found.dtype == np.float32 and (found == wanted).all())
    own_bytes = count_bytes(latents.cells, dtype)[np.array(codes, np.uint8)].sum()
    assert path.stat().st_size <= 4096 + len(codes) * 200 + own_bytes


def test_texts_and_sizes_are_those_of_the_part(tmp_path, make_image):
    rows = [Row("a\u2028b 图", make_image(1), {"key": "x", "n": 1.5}), Row("", make_image(2), {})]
    write_part(tmp_path / "part-0.gz", rows)
    part = Part(tmp_path / "part-0.gz")
    texts = [*read_texts(part), encode_texts(["one", "two\nlines\ud800"], {}), b""]
    key = make_key(part=part.identity)
    latents = Latents(make_file(tmp_path, key, [0, 1, 2, 0], texts=texts), key, writable=True)
    assert [latents.texts(row).caption for row in range(3)] == ["a\u2028b 图", "", "one"]
    assert latents.texts(2).other_captions == ("two\nlines\ud800",)
    assert [latents.texts(row).meta for row in range(3)] == [rows[0].meta, {}, {}]
    assert latents.widths.tolist() == [20, 21, 22, 23] and latents.heights.tolist() == [30, 31, 32, 33]
    with pytest.raises(RowError) as caught:
        latents.texts(3)
    assert caught.value.reason == "unreadable"
    latents.mark_bad(3, 0, "gzip")
    with pytest.raises(RowError) as caught:
        latents.texts(3)
    assert caught.value.reason == "gzip"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=50))
def test_rounding_is_to_the_nearest_ties_to_even(values):
    moments = np.array(values, np.float32)
    for dtype in LATENTS_DTYPES:
        stored = encode_array(moments, dtype)
        rounded = decode_array(stored, dtype)
        assert (encode_array(rounded, dtype) == stored).all()
        if dtype == "bfloat16":  # no bfloat16 is nearer; of two as near, it is the even one
            for step in (-1, 1):
                other = decode_array((stored.astype(np.int32) + step).astype(np.uint16), dtype).astype(np.float64)
                ours, theirs = abs(rounded.astype(np.float64) - moments), abs(other - moments)
                assert (
                    (ours < theirs) | ((ours == theirs) & (stored % 2 == 0)) | (other * moments < 0) | np.isnan(other)
                ).all()
        elif dtype == "float32":
            assert (rounded == moments).all()
        else:
            assert (rounded == moments.astype(np.float16)).all()


@pytest.mark.parametrize(
    "dtype, value", [("float16", 70000.0), ("float32", np.nan), ("bfloat16", np.inf), ("bfloat16", np.nan)]
)
def test_what_is_not_finite_once_rounded_is_a_bad_row(tmp_path, dtype, value):
    key = make_key(dtype)
    latents = Latents(make_file(tmp_path, key, [0, 0]), key, writable=True)
    moments = np.zeros((2, C, 2, 2), np.float32)
    moments[1, 0, 0, 0] = value
    assert latents.write(1, 0, moments) is None and latents.reason(1, 0) == "not_finite"
    with pytest.raises(RowError, match="row 1") as caught:
        latents.read(1, 0)
    assert caught.value.reason == "not_finite" and latents.read(0, 0) is None


def test_every_reason_of_reading_rows_has_a_number():
    package = Path(__file__).parents[3] / "ppldm/data"
    found = {
        reason
        for path in package.rglob("*.py")
        for reason in re.findall(r'RowError\(\s*"(\w+)"', path.read_text("utf-8"))
    }
    assert "too_small" in found and found <= {*REASONS}


def test_moments_of_another_shape_are_refused(tmp_path):
    latents = Latents(make_file(tmp_path, make_key(), [1]), writable=True)
    with pytest.raises(ValueError, match="row 0"):
        latents.write(0, 0, np.zeros((2, C, 2, 2), np.float32))


def flip_bit(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_any_damaged_bit_is_seen(tmp_path):
    """A bit of the header, the codes or the texts: when the file is opened. One of moments or their checksum: when they
    are read, and by `is_damaged`, which is how the file is repaired."""
    key, rng = make_key(), np.random.default_rng(1)
    path = make_file(tmp_path, key, [0] * 5)
    writer, wanted = Latents(path, key, writable=True), []
    for row in range(5):
        wanted.append(writer.write(row, 0, draw_moments(rng, key, 0)))
    size = path.stat().st_size
    moments_start = size - 5 * 2 * C * 4 * 2
    seen_at_open = 0
    for place in [*range(0, moments_start, 37), *range(moments_start, size, 11)]:
        before = path.read_bytes()[place]
        flip_bit(path, place)
        try:
            latents = Latents(path, key)
        except PartError as error:
            seen_at_open += 1
            assert place < moments_start and "precompute" in str(error)
        else:
            damaged = [row for row in range(5) if latents.is_damaged(row, 0)]
            for row in range(5):
                if row in damaged:
                    with pytest.raises((PartError, RowError), match=f"row {row}"):
                        latents.read(row, 0)
                else:
                    found = latents.read(row, 0)
                    assert (found == wanted[row]).all()
            assert damaged or place < moments_start  # else it was one of the bytes between sections
        flip_bit(path, place)
        assert path.read_bytes()[place] == before
    assert seen_at_open > 10


@pytest.mark.parametrize("bytes_left", [0, 10, 200, -1])
def test_a_file_cut_short_is_damaged(tmp_path, bytes_left):
    path = make_file(tmp_path, make_key(), [0, 1])
    os.truncate(path, bytes_left if bytes_left >= 0 else path.stat().st_size - 1)
    with pytest.raises(PartError, match="damaged.*ppldm precompute"):
        Latents(path)


def test_two_processes_may_write_other_rows(tmp_path):
    key, rng = make_key(), np.random.default_rng(1)
    path = make_file(tmp_path, key, [0] * 40)
    moments = [draw_moments(rng, key, 0) for _ in range(40)]
    children = []
    for first in range(2):
        if not (pid := os.fork()):
            latents = Latents(path, key, writable=True)
            for row in range(first, 40, 2):
                latents.write(row, 0, moments[row])
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    latents = Latents(path, key)
    assert all(
        (latents.read(row, 0) == decode_array(encode_array(moments[row], "float16"), "float16")).all()
        for row in range(40)
    )


CHANGES = {
    "autoencoder": {"autoencoder": "4567"},
    "shapes": {"shapes": [(32, 32)]},
    "crop_fraction": {"crops": CropRule(0.8, random=False)},
    "interpolation": {"crops": CropRule(random=False, interpolation="area")},
    "crops": {"crops": CropRule(num_crops=4)},
    "flips": {"crops": CropRule(random=False, flip=True)},
    "upscale": {"crops": CropRule(random=False, enlarge=True)},
    "dtype": {"dtype": "float32"},
    "part": {"part": (100, 8)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_latents_of_another_key_are_refused_by_the_field(tmp_path, name):
    part, wanted = tmp_path / "part-0.gz", make_key()
    other = make_key(**CHANGES[name])
    path = make_file(tmp_path, other, [0])
    assert wanted.digest != other.digest and read_key(path) == other
    for refused in (lambda: Latents(path, wanted), lambda: find_cached(part, wanted, None)):
        with pytest.raises(PartError, match=rf"{name} was .* and is .*ppldm precompute FILELIST --vae"):
            refused()
    assert len(wanted.differences(other)) == 1
    right = make_file(tmp_path, wanted, [0])
    assert find_cached(part, wanted, None) == right


def test_without_the_part_its_latents_are_found_by_name(tmp_path):
    part = tmp_path / "gone" / "part-0.gz"
    source = Source(Path("x.filelist"), (), latents="cached", latents_dir=tmp_path)
    with pytest.raises(PartError, match="not here, and .* has no cached latents of it"):
        open_part(part, source)
    make_file(tmp_path, make_key(), [0])
    make_file(tmp_path, make_key("float32"), [0])
    make_file(tmp_path, make_key(part=(7, 9)), [0, 0], name="part-0.gz.more")
    rows = open_part(part, source)
    assert len(rows) == 1 and rows.identity == (100, 7)
    make_file(tmp_path, make_key(part=(5, 5)), [0])
    with pytest.raises(PartError, match="latents of several parts named part-0.gz"):
        open_part(part, source)
