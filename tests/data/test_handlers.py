import pytest

from ppldm.data.handlers import BadRows
from ppldm.utils.errors import DataError, RowError


def loader(bad):
    def load(row):
        if row in bad:
            raise RowError(f"reason{row}", f"row {row} is bad")
        return f"row {row}"

    return load


@pytest.mark.parametrize(
    "bad, row, used, reasons",
    [([], 3, 3, []), ([3], 3, 4, ["reason3"]), ([3], 4, 4, []), ([8, 9, 0], 8, 1, ["reason8", "reason9", "reason0"])],
)
def test_the_next_good_row_stands_in(bad, row, used, reasons):
    assert BadRows().load(loader(bad), row, 10) == (f"row {used}", used, reasons)


def test_raise_stops_at_the_first():
    with pytest.raises(DataError, match="reason3.*row 3 is bad"):
        BadRows("raise").load(loader([3]), 3, 10)


@pytest.mark.parametrize("limit, num_rows, count", [(5, 1000, 5), (100, 1000, 100), (100, 7, 7)])
def test_too_many_in_a_row_are_an_error_with_three_examples(limit, num_rows, count):
    with pytest.raises(DataError, match=f"^{count} bad rows in a row") as caught:
        BadRows(limit=limit).load(loader(range(1000)), 2, num_rows)
    assert str(caught.value).count("is bad") == 3


def test_one_under_the_limit_goes_on():
    assert BadRows(limit=5).load(loader(range(2, 6)), 2, 1000)[1] == 6
