"""Law: a shard of MDS gives its columns as the published format lays them out, or says what is wrong with it."""

import struct
from pathlib import Path

import numpy as np
import pytest
from formats import write_mds
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.filelist import Source
from ppldm.data.formats.mds import MdsLayout
from ppldm.data.formats.open import open_part
from ppldm.data.formats.row import Row
from ppldm.utils.errors import PartError, RowError

SHAPE = (4, 2, 3)


def open_shard(path):
    return open_part(path, Source(Path("x.filelist"), (), format="mds"))


def latents_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(SHAPE).astype("<f2")


def write_latents(path, count=5, **more):
    columns = {
        "caption": ("str", None, lambda row: row.caption.encode()),
        "caption_latents": ("bytes", None, lambda row: b"\1" * (1000 + row.meta["n"])),
        "latents_256": ("bytes", None, lambda row: latents_of(row.meta["n"]).tobytes()),
        "latents_512": ("bytes", None, lambda row: b"\2" * 50),
        "n": ("int", 8, lambda row: struct.pack("<q", row.meta["n"])),
    }
    write_mds(path, [Row(f"caption {n}", b"", {"n": n}) for n in range(count)], columns | more)
    return path


def test_the_bytes_of_a_shard_written_by_hand(tmp_path, make_image):
    """Of one sample, from the description of the format and not by our writer."""
    image = make_image(0, (6, 5), "JPEG")
    stated = b'{"column_encodings":["str","jpeg","int32"],"column_names":["caption","jpg","w"],'
    stated += b'"column_sizes":[null,null,4]}'
    sample = struct.pack("<II", 5, len(image)) + b"a dog" + image + struct.pack("<i", -7)
    start = 12 + len(stated)
    (tmp_path / "s.mds").write_bytes(struct.pack("<III", 1, start, start + len(sample)) + stated + sample)
    shard = open_shard(tmp_path / "s.mds")
    assert shard.read(0) == Row("a dog", image, {"w": -7})
    assert shard.read_fields(0) == ("a dog", {"w": -7})
    assert (shard.widths[0], shard.heights[0]) == (6, 5) and shard.latents == {}


def test_latents_are_read_without_the_rest(tmp_path):
    shard = open_shard(write_latents(tmp_path / "s.mds"))
    assert shard.latents == {256: "latents_256", 512: "latents_512"} and shard.widths.tolist() == [0] * 5
    for row in (4, 0, 3):
        assert np.array_equal(shard.read_latents(row, 256, SHAPE), latents_of(row))
        assert shard.read_fields(row) == (f"caption {row}", {"n": row})
    assert shard.read(2) == Row("caption 2", b"", {"n": 2})
    with pytest.raises(RowError, match="50 bytes of latents where 4 x 2 x 3 float16"):
        shard.read_latents(2, 512, SHAPE)
    with pytest.raises(PartError, match="latents of 256, 512 pixels and not of 384"):
        shard.read_latents(2, 384, SHAPE)


def test_a_shard_of_latents_and_pictures_has_both(tmp_path, make_image):
    image = make_image(3, (7, 9))
    shard = open_shard(write_latents(tmp_path / "s.mds", jpg=("jpeg", None, lambda row: image)))
    assert shard.read(1) == Row("caption 1", image, {"n": 1}) and shard.widths[1] == 7
    assert np.array_equal(shard.read_latents(1, 256, SHAPE), latents_of(1))


def test_a_row_whose_columns_do_not_fill_it_is_bad(tmp_path):
    path = write_latents(tmp_path / "s.mds")
    start, data = int(MdsLayout(path).starts[2]), bytearray(path.read_bytes())
    data[start] -= 1  # of the length of its caption
    path.write_bytes(data)
    shard = open_shard(path)
    for read in (lambda: shard.read_fields(2), lambda: shard.read_latents(2, 256, SHAPE)):
        with pytest.raises(RowError, match="row 2: damaged MDS data"):
            read()
    assert shard.read_fields(3)[0] == "caption 3"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_damage_gives_the_row_of_another_or_an_error_of_python(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("mds") / "s.mds"
    sound = write_latents(path, 3).read_bytes()
    place = data.draw(st.integers(0, len(sound) - 1))
    path.write_bytes(sound[:place] + bytes([data.draw(st.integers(0, 255))]) + sound[place + 1 :])
    try:
        shard = open_shard(path)
        for row in range(len(shard)):
            try:
                assert shard.read_latents(row, 256, SHAPE).shape == SHAPE
            except RowError as error:
                assert error.reason in ("damaged", "latents")
    except PartError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    "data, words",
    [
        (b"\0" * 40, "not an MDS shard"),
        (struct.pack("<IIII", 2, 16, 16, 17), "not an MDS shard"),
        (struct.pack("<III", 1, 14, 14) + b"{}", "not an MDS shard"),
    ],
)
def test_what_is_no_shard_is_refused_in_words(tmp_path, data, words):
    (tmp_path / "s.mds").write_bytes(data)
    with pytest.raises(PartError, match=words):
        open_shard(tmp_path / "s.mds")


def test_a_shard_of_another_length_than_it_says_is_refused(tmp_path):
    sound = write_latents(tmp_path / "s.mds").read_bytes()
    for damaged in (*(sound[:length] for length in (*range(4, 40), len(sound) - 1)), sound + b"\0"):
        (tmp_path / "s.mds").write_bytes(damaged)
        with pytest.raises(PartError, match="not an MDS shard"):
            MdsLayout(tmp_path / "s.mds")


def test_a_shard_without_caption_or_picture_is_refused(tmp_path):
    rows = [Row("a", b"", {"key": "1"})]
    for columns, needed in (
        ({"name": ("str", None, lambda row: b"x")}, "caption"),
        ({"caption": ("str", None, lambda row: b"x"), "pixels": ("pil", None, lambda row: b"x")}, "jpg"),
    ):
        write_mds(tmp_path / "s.mds", rows, columns)
        with pytest.raises(PartError, match=needed):
            open_shard(tmp_path / "s.mds")
