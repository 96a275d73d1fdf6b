"""A part that is replaced while it is read is noticed at its next row; one that is only touched is read on."""

import os
import shutil

import numpy as np
import pytest

from ppldm.data.formats import base
from ppldm.data.formats.base import OpenFile
from ppldm.data.formats.folder import ImageFolder
from ppldm.data.formats.part import Part, write_part
from ppldm.utils.checksums import measure_file
from ppldm.utils.errors import PartError, RowError


@pytest.fixture
def replaced(tmp_path, make_rows):
    """The bytes of a part with as many rows as the second part of list 0 and others in them."""
    write_part(tmp_path / "new.gz", make_rows(90, 99))
    return (tmp_path / "new.gz").read_bytes()


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("how", ["renamed over", "written over", "same time", "gone"])
def test_a_part_that_is_replaced_is_noticed_at_its_next_row(make_dataset, tmp_path, replaced, how, is_open):
    dataset, path = make_dataset(), tmp_path / "list0-part-00001.gz"
    before = path.stat()
    if is_open:
        dataset[(0, 5)]
    if how == "gone":
        path.unlink()
    elif how == "renamed over":
        os.replace(tmp_path / "new.gz", path)
    else:
        path.write_bytes(replaced)
        if how == "same time":
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    dataset[(0, 2)]  # of another part
    with pytest.raises(PartError, match=r"list0-part-00001.gz (has changed|is gone).*; ") as caught:
        dataset[(0, 6)]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_part_that_is_touched_or_copied_back_is_read_on(make_dataset, tmp_path, is_open):
    dataset, path = make_dataset(), tmp_path / "list0-part-00001.gz"
    expected = dataset[(0, 6)] if is_open else make_dataset(dataset.sources)[(0, 6)]
    os.utime(path)
    assert np.array_equal(dataset[(0, 6)]["pixel_values"], expected["pixel_values"])
    shutil.copy(path, tmp_path / "copy")
    path.unlink()
    shutil.copy(tmp_path / "copy", path)
    assert np.array_equal(dataset[(0, 6)]["pixel_values"], expected["pixel_values"])


def test_a_folder_that_is_gone_is_an_error_and_not_a_bad_row(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("a.jpg", "a.txt", "b.jpg", "b.txt"):
        (folder / name).write_text("x")
    part = ImageFolder(folder)
    (folder / "a.jpg").unlink()
    with pytest.raises(RowError):
        part.read(0)
    shutil.rmtree(folder)
    with pytest.raises(PartError, match="pictures is gone"):
        part.read(1)


def test_a_file_that_is_copied_back_is_read_from_the_new_one(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b"0123456789")
    file = OpenFile(path, measure_file(path))
    number = file.number
    shutil.copy(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    assert file.read(2, 3, "row") == b"234" and file.number == number
    assert os.path.samestat(os.fstat(number), os.stat(path)), "the old file is given back"


def test_a_part_that_is_replaced_while_it_is_indexed_is_noticed(tmp_path, make_rows, monkeypatch):
    path, real = tmp_path / "p.gz", base.open_index
    write_part(tmp_path / "new.gz", make_rows(9, 12))
    write_part(path, make_rows(0, 3))

    def replacing(*arguments):
        found = real(*arguments)
        os.replace(tmp_path / "new.gz", path)
        return found

    monkeypatch.setattr(base, "open_index", replacing)
    part = Part(path)
    with pytest.raises(PartError, match="p.gz row 0: .* has changed"):
        part.read(0)
