"""A row's second image: with layout=control every format has it, and without, rows are what they were."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from formats import WRITERS, write_parquet
from PIL import Image

from ppldm.data.filelist import Source, read_options, read_sources, write_filelist
from ppldm.data.formats.index import IndexSpec
from ppldm.data.formats.layouts import FORMATS
from ppldm.data.formats.open import open_part, summarize
from ppldm.data.formats.row import BadRows, Row
from ppldm.data.select.columns import read_columns
from ppldm.utils.errors import FilelistError, PartError, RowError

OTHERS = [name for name in FORMATS if name != "part"]


def negative(image: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(255 - np.asarray(Image.open(io.BytesIO(image)))).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def rows(make_image):
    images = [make_image(i, (20 + i % 3, 18)) for i in range(20)]
    return [Row(f"picture {i}", image, {"key": f"{i:04}"}, (), negative(image)) for i, image in enumerate(images)]


def source(format, layout="control"):
    return Source(Path("x.filelist"), (), format=format, layout=layout)


def read_all(path, format, layout="control"):
    part, found = open_part(path, source(format, layout)), []
    for number in range(len(part)):
        try:
            found.append(part.read(number))
        except RowError as error:
            found.append(error.reason)
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_it_and_rows_are_else_the_same(tmp_path, rows, format):
    WRITERS[format](tmp_path / "p", rows)
    assert read_all(tmp_path / "p", format) == rows
    part = open_part(tmp_path / "p", source(format))
    assert part.widths.tolist() == [20 + i % 3 for i in range(20)]
    assert summarize(tmp_path / "p", source(format)).rows == 20
    assert [part.read_fields(i) for i in range(20)] == [(row.caption, row.meta) for row in rows]
    assert read_columns(part, source(format), ["key"])


@pytest.mark.parametrize("format", OTHERS)
def test_a_row_without_one_is_a_bad_row(tmp_path, rows, format):
    WRITERS[format](tmp_path / "p", [replace(row, control=b"") if i % 5 == 2 else row for i, row in enumerate(rows)])
    found = read_all(tmp_path / "p", format)
    assert found == ["no_control" if i % 5 == 2 else row for i, row in enumerate(rows)]


@pytest.mark.parametrize("format", ["csv", "parquet", "mds"])
def test_a_table_without_the_column_is_refused(tmp_path, rows, format):
    WRITERS[format](tmp_path / "p", [replace(row, control=b"") for row in rows])
    with pytest.raises(PartError, match="it needs one of control, conditioning_image, control_image"):
        open_part(tmp_path / "p", source(format))


@pytest.mark.parametrize("format", [name for name in OTHERS if name != "folder"])
def test_without_the_layout_it_is_not_looked_at(tmp_path, rows, format):
    WRITERS[format](tmp_path / "p", rows)
    found = read_all(tmp_path / "p", format, "default")
    assert [(row.caption, row.image, row.control) for row in found] == [(r.caption, r.image, b"") for r in rows]


def test_a_folder_without_the_layout_says_what_the_files_may_be(tmp_path, rows):
    WRITERS["folder"](tmp_path / "p", rows[:2])
    assert [one if isinstance(one, str) else one.caption for one in read_all(tmp_path / "p", "folder", "default")] == [
        "picture 0", "no_caption", "picture 1", "no_caption",
    ]  # fmt: skip
    with pytest.raises(RowError, match="say layout=control"):
        open_part(tmp_path / "p", source("folder", "default")).read(1)


@pytest.mark.parametrize("names, reason", [
    (["0.jpg", "0.txt", "0.control.JPG"], None),
    (["0.jpg", "0.txt", "0.Control.webp"], None),
    (["0.jpg", "0.txt", "0.control.png", "0.control.webp"], "two_images"),
    (["0.control.png", "0.txt"], "no_image"),
    (["0.jpg", "0.control.png"], "no_caption"),
])  # fmt: skip
def test_names_of_files(tmp_path, rows, names, reason):
    for name in [*names, "1.jpg", "1.txt", "1.control.png"]:
        (tmp_path / name).write_bytes(b"a caption" if name.endswith("txt") else rows["control" in name.lower()].image)
    found, _ = read_all(tmp_path, "folder")
    assert found == (reason or Row("a caption", rows[0].image, {"key": "0"}, (), rows[1].image))


@pytest.mark.parametrize("struct, compression", [(True, "snappy"), (False, "none"), (False, "zstd")])
def test_second_images_of_parquet_are_read(tmp_path, rows, struct, compression):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"image": [row.image for row in rows], "text": [row.caption for row in rows]}
    columns |= {"control": [{"bytes": row.control} if struct else row.control for row in rows]}
    pq.write_table(pa.table(columns), tmp_path / "p", row_group_size=7, compression=compression)
    part = open_part(tmp_path / "p", source("parquet"))
    assert [part.read(i).control for i in (19, 0, 7, 6)] == [rows[i].control for i in (19, 0, 7, 6)]


def test_a_list_of_any_format_may_say_it_and_no_other_order_of_columns(tmp_path, rows):
    write_parquet(tmp_path / "p", rows)
    write_filelist(tmp_path / "f.filelist", ["p"])
    (tmp_path / "f.list").write_text("f.filelist format=parquet layout=control\n")
    assert [one.layout for one in read_sources(tmp_path / "f.list")] == ["control"]
    (tmp_path / "f.list").write_text("f.filelist format=parquet\n")
    assert [one.layout for one in read_sources(tmp_path / "f.list", "control")] == ["control"]
    assert [one.layout for one in read_sources(tmp_path / "f.list", "vc")] == ["default"]
    (tmp_path / "f.list").write_text("f.filelist format=parquet layout=vc\n")
    with pytest.raises(FilelistError, match="layout has a meaning only with format=part"):
        read_sources(tmp_path / "f.list")
    assert json.dumps([read_options(source("parquet", one))["layout"] for one in ("default", "control")]) == (
        '[null, "control"]'
    )


def test_parts_need_no_second_index(tmp_path, rows):
    WRITERS["part"](tmp_path / "p.gz", rows)
    before = sorted(path.name for path in tmp_path.iterdir())
    part = open_part(tmp_path / "p.gz", source("part"))
    read_columns(part, source("part"), ["key"])
    assert part.read(3) == rows[3] and sorted(path.name for path in tmp_path.iterdir()) == before
    for path in tmp_path.glob("p.gz.*"):
        path.unlink()
    assert read_all(tmp_path / "p.gz", "part") == rows and (tmp_path / "p.gz.idx").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_samples_are_the_same_whatever_the_format(tmp_path, rows, make_dataset, format):
    def samples(name):
        folder = tmp_path / f"as-{name}"
        folder.mkdir(exist_ok=True)
        WRITERS[name](folder / "p", rows)
        write_filelist(folder / "f.filelist", ["p"])
        (folder / "f.list").write_text(f"f.filelist format={name} layout=control\n")
        dataset = make_dataset(
            read_sources(folder / "f.list"), inputs={"control": "row"}, crops={"flip": True}, bad_rows=BadRows("raise")
        )
        return dataset.make_batch([(epoch, place) for epoch in range(2) for place in range(20)])

    expected, found = samples("part"), samples(format)
    assert all(np.array_equal(expected[key], found[key]) for key in expected)
    assert np.abs(255 - found["control"].astype(int) - found["pixel_values"]).max() <= 1


def test_each_layout_has_names_of_its_own():
    spec = IndexSpec((4,), copy_suffix=".names")
    assert spec.of_layout("default") is spec
    assert (spec.of_layout("control").index_suffix, spec.of_layout("control").copy_suffix) == (
        ".control.idx", ".control.names",
    )  # fmt: skip
