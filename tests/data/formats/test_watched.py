"""A part that is replaced while it is read is noticed at its next row."""

import os
import shutil

import numpy as np
import pytest

from ppldm.data.formats.part import write_part
from ppldm.utils.errors import PartError


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
