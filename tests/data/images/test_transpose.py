import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ppldm.data.kernels import transpose


@settings(deadline=None, max_examples=300)
@given(*[st.integers(1, 150)] * 2, *[st.integers(0, 40)] * 4)
@example(16, 16, 0, 0, 0, 0)
@example(64, 1, 0, 0, 0, 0)
@example(65, 47, 1, 2, 3, 4)
def test_every_byte_is_where_it_belongs_and_none_is_written_elsewhere(height, width, above, below, before, behind):
    rng = np.random.default_rng(height * 1000 + width)
    matrix = rng.integers(0, 256, (above + height + below, before + width + behind), dtype=np.uint8)
    kept = matrix.copy()
    result = transpose(matrix, above, above + height, before, before + width)
    assert result.shape == (width, height) and result.flags.c_contiguous
    assert (result == matrix[above : above + height, before : before + width].T).all() and (matrix == kept).all()
