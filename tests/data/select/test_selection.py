import errno
import gzip
import itertools
import pickle
import shutil
import struct
import zlib
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import Part, write_part
from ppldm.data.formats.row import Row, encode_row
from ppldm.data.order import Mix
from ppldm.data.select import columns as columns_module
from ppldm.data.select import columns as sidecar
from ppldm.data.select import selection as selection_module
from ppldm.data.select.expression import parse_where
from ppldm.data.select.selection import TOO_SMALL, Selection, select_rows
from ppldm.utils.errors import DataError, RowError


@pytest.fixture
def sources(tmp_path, make_image):
    """Three parts in two lists, 60 rows of i + 10 by 30 pixels; row i has aesthetic i / 10, or none if i % 7 is 0."""
    image = make_image()
    rows = [
        Row(f"picture {i}", image, {"width": i + 10, "height": 30, **({"aesthetic": i / 10} if i % 7 else {})})
        for i in range(60)
    ]
    write_part(tmp_path / "a.gz", rows[:25])
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"".join(map(encode_row, rows[25:40]))))
    (tmp_path / "c").write_bytes(b"".join(map(encode_row, rows[40:])))
    write_filelist(tmp_path / "x.filelist", ["a.gz", "b.gz"])
    write_filelist(tmp_path / "y.filelist", ["c"])
    write_filelist(tmp_path / "l.list", ["x.filelist", "y.filelist"])
    return read_sources(tmp_path / "l.list")


def rows_of(selection):
    return [selection[i] for i in range(len(selection))]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1), st.data())
def test_a_selection_is_the_chosen_numbers_in_order(parts, data):
    masks = [None if all(part) and data.draw(st.booleans()) else np.packbits(part) for part in parts]
    cut = data.draw(st.integers(0, len(parts)))
    selection = Selection([len(part) for part in parts], masks, [cut, len(parts) - cut], {})
    chosen = list(itertools.chain(*parts))
    assert rows_of(pickle.loads(pickle.dumps(selection))) == [i for i, used in enumerate(chosen) if used]
    assert selection.list_sizes == [sum(map(sum, parts[:cut])), sum(map(sum, parts[cut:]))]
    assert selection.num_rows == len(chosen) and len(selection) == sum(chosen)
    for outside in (-1, len(selection)):
        with pytest.raises(IndexError):
            selection[outside]


def test_without_a_condition_every_row_is_used(sources):
    selection = select_rows(sources)
    assert rows_of(selection) == list(range(60)) and selection.list_sizes == [40, 20] and not selection.skipped


def refuse(*_):
    raise AssertionError("a row was read")


def test_sizes_alone_need_no_row(sources, monkeypatch):
    select_rows(sources)
    monkeypatch.setattr(Part, "read", refuse)
    monkeypatch.setattr(Part, "read_fields", refuse)
    selection = select_rows(sources, parse_where("width < 50 and height == 30"), 24)
    assert rows_of(selection) == list(range(14, 40)) and selection.list_sizes == [26, 0]
    assert selection.skipped == {TOO_SMALL: 14, "where: false": 20}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_fields_are_read_and_every_row_is_accounted_for(sources, num_workers):
    selection = select_rows(sources, parse_where("width >= 20 and aesthetic > 3"), 16, num_workers)
    assert rows_of(selection) == [i for i in range(31, 60) if i % 7]
    assert selection.skipped == {
        TOO_SMALL: 6,
        "where: false": sum(1 for i in range(6, 31) if i < 10 or i % 7),
        "where: no field aesthetic": sum(1 for i in range(10, 60) if i % 7 == 0),
    }
    assert len(selection) + selection.skipped.total() == selection.num_rows == 60


def test_captions_can_be_asked_for(sources):
    assert rows_of(select_rows(sources, parse_where("caption in ('picture 3', 'picture 44', 'no')"))) == [3, 44]


WHERE = "aesthetic > 3"


def test_rows_are_read_once_and_then_no_more_whatever_is_asked(sources, monkeypatch):
    first = rows_of(select_rows(sources, parse_where(WHERE)))
    assert first == [i for i in range(31, 60) if i % 7]
    monkeypatch.setattr(Part, "read", refuse)
    monkeypatch.setattr(Part, "read_fields", refuse)
    assert rows_of(select_rows(sources, parse_where(WHERE), 16)) == first
    assert rows_of(select_rows(sources, parse_where(f"{WHERE} and caption != 'picture 40'"))) == [
        row for row in first if row != 40
    ]
    assert rows_of(select_rows(sources, parse_where("width < 60 and aesthetic > 3 or width > 65"))) == [
        i for i in range(60) if (i + 10 < 60 and i % 7 and i > 30) or i + 10 > 65
    ]


def test_parts_that_were_indexed_or_written_here_are_never_read_for_a_condition(sources, monkeypatch):
    select_rows(sources)
    monkeypatch.setattr(Part, "read_fields", refuse)
    assert rows_of(select_rows(sources, parse_where("aesthetic == 2.4"))) == [24]


def columns_files(sources):
    return [part.with_name(f"{part.name}.columns") for source in sources for part in source.parts]


def test_columns_that_are_missing_stale_or_damaged_are_made_again(sources, make_image, monkeypatch):
    where = parse_where(WHERE)
    first = select_rows(sources, where)
    for path in columns_files(sources):
        sound = path.read_bytes()
        for damaged in (b"", sound[:9], sound[:60] + bytes([sound[60] ^ 1]) + sound[61:], sound[:-1], None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            again = select_rows(sources, where)
            assert rows_of(again) == rows_of(first) and again.skipped == first.skipped
            assert path.read_bytes() == sound
    # Another part of the same name: its columns must not be those of the old one.
    part, stale = sources[0].parts[0], columns_files(sources)[0].read_bytes()
    write_part(part, [Row(f"other {i}", make_image(), {"aesthetic": 9.0}) for i in range(25)])
    columns_files(sources)[0].write_bytes(stale)
    assert rows_of(select_rows(sources, where))[:25] == list(range(25))


def test_where_a_folder_cannot_be_written_columns_go_to_the_cache(sources, cache_dir, monkeypatch):
    expected = rows_of(select_rows(sources, parse_where(WHERE)))
    for path in columns_files(sources):
        path.unlink()
    atomic_write = sidecar.atomic_write

    def write(path, *args, **kwargs):
        if cache_dir not in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied")
        return atomic_write(path, *args, **kwargs)

    monkeypatch.setattr(sidecar, "atomic_write", write)
    assert rows_of(select_rows(sources, parse_where(WHERE))) == expected
    monkeypatch.setattr(Part, "read_fields", refuse)
    assert rows_of(select_rows(sources, parse_where(WHERE))) == expected
    assert len(list(cache_dir.glob("*.columns"))) == 3 and not any(path.exists() for path in columns_files(sources))


def test_each_layout_has_columns_of_its_own(tmp_path, make_image, monkeypatch):
    image = b64encode(make_image()).decode()
    (tmp_path / "p").write_text(f"first\tsecond\t{image}\t{image}\t{image}\n" * 2)
    write_filelist(tmp_path / "f", ["p"])
    for _ in range(2):
        for layout, caption in (("default", "first"), ("alt_aesthetic", "second"), ("default", "first")):
            sources = read_sources(tmp_path / "f", layout)
            assert len(select_rows(sources, parse_where(f"caption == '{caption}'"))) == 2
            with pytest.raises(DataError, match="2 where: false"):
                select_rows(sources, parse_where(f"caption != '{caption}'"))
    # Nor does it help to take those of another layout for them.
    shutil.copy(tmp_path / "p.columns", tmp_path / "p.alt_aesthetic.columns")
    assert len(select_rows(read_sources(tmp_path / "f", "alt_aesthetic"), parse_where("caption == 'second'"))) == 2
    monkeypatch.setattr(Part, "read_fields", refuse)
    for layout, caption in (("default", "first"), ("alt_aesthetic", "second")):
        sources = read_sources(tmp_path / "f", layout)
        assert len(select_rows(sources, parse_where(f"caption == '{caption}'"))) == 2


def test_blocks_of_a_part_are_judged_one_after_the_other(sources, monkeypatch):
    where = parse_where("aesthetic > 3 and width < 66 or caption == 'picture 26' or width == 13")
    expected = select_rows(sources, where)
    monkeypatch.setattr(columns_module, "_BLOCK_ROWS", 7)
    for path in columns_files(sources):
        path.unlink()
    found = select_rows(sources, where)
    assert rows_of(found) == rows_of(expected) == [3, 26, *(i for i in range(31, 56) if i % 7)]
    assert found.skipped == expected.skipped


@pytest.mark.parametrize("sign, rows", [("and", [6, 7, 9]), ("or", [3, 4, 5, 6, 7, 8, 9])])
def test_what_sizes_decide_is_decided_for_rows_that_cannot_be_read(tmp_path, make_image, monkeypatch, sign, rows):
    """Rows 2, 12 pixels wide, and 8, 18 pixels wide, cannot be read."""
    lines = [encode_row(Row("x", make_image(size=(10 + i, 20)), {"a": i})) for i in range(10)]
    (tmp_path / "p").write_bytes(b"".join(lines))
    write_filelist(tmp_path / "f", ["p"])
    read_fields = Part.read_fields

    def read_some(part, row):
        if row in (2, 8):
            raise RowError("made", "made bad")
        return read_fields(part, row)

    monkeypatch.setattr(Part, "read_fields", read_some)
    selection = select_rows(read_sources(tmp_path / "f"), parse_where(f"a > 2 {sign} width > 15"))
    assert rows_of(selection) == rows
    assert selection.skipped == {"made": 1, "where: false": 9 - len(rows)}


def test_a_row_that_cannot_be_read_is_counted_by_its_reason(tmp_path, make_rows):
    lines = [encode_row(row) for row in make_rows(0, 5)]
    lines[1], lines[3] = b"no columns\n", b"\xff\xff\t\teA==\n"
    (tmp_path / "p").write_bytes(b"".join(lines))
    write_filelist(tmp_path / "f", ["p"])
    selection = select_rows(read_sources(tmp_path / "f"), parse_where("key in (0, 2)"))
    assert rows_of(selection) == [0, 2] and selection.skipped == {"columns": 1, "encoding": 1, "where: false": 1}
    selection = select_rows(read_sources(tmp_path / "f"), None, 19)
    assert rows_of(selection) == [1, 3] and selection.skipped == {TOO_SMALL: 3}


def test_images_of_unknown_size_are_kept_and_counted_by_a_condition(tmp_path, make_rows):
    write_part(tmp_path / "p.gz", [Row("odd", b"no image"), *make_rows(0, 2)])
    write_filelist(tmp_path / "f", ["p.gz"])
    sources = read_sources(tmp_path / "f")
    assert rows_of(select_rows(sources, None, 19)) == [0]
    selection = select_rows(sources, parse_where("width > 1"))
    assert rows_of(selection) == [1, 2] and selection.skipped == {"where: no field width": 1}


def test_nothing_left_is_an_error_with_the_reasons(sources, tmp_path):
    with pytest.raises(DataError, match=r"no row of .*x.filelist .*60 where: no field aesthetik"):
        select_rows(sources, parse_where("aesthetik > 3"))
    assert len(select_rows(sources, parse_where("width < 20"))) == 10
    write_filelist(tmp_path / "weighted.list", ["x.filelist 1", "y.filelist 1"])
    with pytest.raises(DataError, match="no row of .*y.filelist"):
        select_rows(read_sources(tmp_path / "weighted.list"), parse_where("width < 20"))
    write_filelist(tmp_path / "weighted.list", ["x.filelist 1", "y.filelist 0"])
    assert len(select_rows(read_sources(tmp_path / "weighted.list"), parse_where("width < 20"))) == 10


def test_the_table_of_rows_in_the_log(sources, capsys):
    select_rows(sources, parse_where("width < 50 and height == 30"), 24).log()
    lines = [line.split("INFO")[1].split() for line in capsys.readouterr().err.splitlines() if "INFO   " in line]
    assert lines == [["rows", "60"], ["where:", "false", "20"], ["too", "small", "14"], ["rows", "used", "26"]]


def test_samples_and_epochs_run_over_the_selected_rows(make_dataset, make_sources):
    sources = make_sources([5, 9], [10])
    selection = select_rows(sources, parse_where("key not in (0, 7, 8) and width != 21"))
    everything, dataset = make_dataset(sources), make_dataset(sources, selection=selection)
    chosen = [i for i in range(24) if i not in (0, 7, 8) and i % 3 != 1]
    assert len(dataset) == len(chosen) and sum(dataset.list_sizes) == len(chosen)
    epochs, places = Mix(dataset.list_sizes, None, 3).samples(0, 2 * len(chosen))
    samples = [dataset[key] for key in zip(epochs.tolist(), places.tolist(), strict=True)]
    for epoch in (0, 1):
        used = [int(sample["row_ids"]) for sample in samples[epoch * len(chosen) : (epoch + 1) * len(chosen)]]
        assert sorted(used) == chosen
    for (epoch, _), sample in zip(zip(epochs, places, strict=True), samples, strict=True):
        same = everything[int(epoch), int(sample["row_ids"])]
        assert all(np.array_equal(same[key], sample[key]) for key in same)


@pytest.mark.parametrize("min_side, opened", [(10, set()), (11, {"a.gz"}), (36, {"a.gz", "b.gz", "c"})])
@pytest.mark.parametrize("early", [False, True])
def test_parts_whose_header_says_that_all_is_large_enough_are_not_opened(sources, monkeypatch, min_side, opened, early):
    expected = select_rows(sources, None, min_side) if min_side < 31 else None
    parts = [path for source in sources for path in source.parts]
    if early:  # as indexes were written before their headers said the smallest side
        opened = {path.name for path in parts}
        for path in [path for folder in {path.parent for path in parts} for path in folder.rglob("*.idx")]:
            data = bytearray(path.read_bytes())
            data[40:44] = bytes(4)
            data[44:48] = struct.pack("<I", zlib.crc32(data[:44]))
            path.write_bytes(data)
    seen = set()
    judge_part = selection_module._judge_part
    monkeypatch.setattr(
        selection_module, "_judge_part", lambda task, **how: seen.add(task[1].name) or judge_part(task, **how)
    )
    if expected is None:
        with pytest.raises(DataError, match="too small"):
            select_rows(sources, None, min_side)
    else:
        found = select_rows(sources, None, min_side)
        assert rows_of(found) == rows_of(expected) and found.skipped == expected.skipped
    assert seen == opened
