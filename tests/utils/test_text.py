import pytest

from ppldm.utils.text import count_of, name_ranks


@pytest.mark.parametrize("number, words", [(0, "0 lists"), (1, "1 list"), (2, "2 lists"), (1000, "1,000 lists")])
def test_one_thing_has_no_s(number, words):
    assert count_of(number, "list") == words


def test_ranks_are_named_in_order():
    assert name_ranks([3]) == "rank 3" and name_ranks({3, 1}) == "ranks 1, 3"
