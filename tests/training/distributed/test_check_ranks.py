"""Equal parameters give equal numbers, one bit less does not, and the odd rank is named."""

import numpy as np
import paddle
import pytest

from ppldm.training.distributed.rank_checks import checksums, first_difference


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_one_bit_changes_the_number(dtype):
    def parameters(change=0):
        values = paddle.linspace(-1, 1, 1000).reshape([10, 100]).astype(dtype)
        integers = values.view({2: "int16", 4: "int32", 8: "int64"}[values.element_size()])
        integers[7, 33] = integers[7, 33] + change
        return {"a": paddle.ones([3], dtype), "b": integers.view(dtype)}

    same, other = checksums(parameters()).numpy(), checksums(parameters(1)).numpy()
    assert (same == checksums(parameters()).numpy()).all()
    assert (same != other).tolist() == [False, True]


@pytest.mark.parametrize(
    "sums, expected",
    [
        ([[1, 2, 3], [1, 2, 3]], None),
        ([[1, 2, 3], [1, 9, 8]], ("b", [1])),
        ([[1, 2, 3], [1, 2, 8], [1, 2, 3]], ("c", [1])),
        ([[7, 2, 3], [1, 2, 3], [1, 2, 3]], ("a", [0])),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 5]], ("c", [0, 1])),
    ],
)
def test_the_first_parameter_and_the_odd_ranks_are_named(sums, expected):
    assert first_difference(["a", "b", "c"], np.array(sums)) == expected
