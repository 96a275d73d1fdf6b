import pytest

from ppldm.data.formats.row import BadRows
from ppldm.utils.errors import DataError, RowError


def loader(bad):
    def load(row):
        if row in bad:
            raise RowError(f"reason{row}", f"row {row} is bad")
        return f"row {row}"

    return load


@pytest.mark.parametrize(
    "bad, candidates, used, reasons",
    [
        ([], [3, 4], 3, []),
        ([3], [3, 9], 9, ["reason3"]),
        ([3], [4, 3], 4, []),
        ([8, 9, 0], [8, 0, 9, 1], 1, ["reason8", "reason0", "reason9"]),
    ],
)
def test_the_first_good_candidate_is_taken_and_no_more_are_asked_for(bad, candidates, used, reasons):
    rest = iter(candidates)
    assert BadRows().load(loader(bad), rest) == (f"row {used}", used, reasons)
    assert list(rest) == candidates[candidates.index(used) + 1 :]


def test_raise_stops_at_the_first():
    with pytest.raises(DataError, match="reason3.*row 3 is bad"):
        BadRows("raise").load(loader([3]), [3, 4])


@pytest.mark.parametrize("limit, num_rows, count", [(5, 1000, 5), (100, 1000, 100), (100, 7, 7)])
def test_too_many_in_a_row_are_an_error_with_three_examples(limit, num_rows, count):
    with pytest.raises(DataError, match=f"^{count} bad rows in a row") as caught:
        BadRows(limit=limit).load(loader(range(1000)), range(num_rows))
    assert str(caught.value).count("is bad") == 3


def test_one_under_the_limit_goes_on():
    assert BadRows(limit=5).load(loader(range(2, 6)), range(2, 1000))[1] == 6
