"""--global_batch_size is met exactly on any number of devices, or refused with what would do."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppldm.config.training import TrainingOptions
from ppldm.utils.errors import ConfigError

SIZES = st.integers(1, 64)


def options(wanted, at_once):
    return TrainingOptions(output_dir="o", global_batch_size=wanted, per_device_train_batch_size=at_once)


@given(wanted=st.integers(1, 4096), at_once=SIZES, num_ranks=SIZES)
def test_met_exactly_or_refused_with_what_would_do(wanted, at_once, num_ranks):
    if wanted % (at_once * num_ranks) == 0:
        assert options(wanted, at_once).samples_of_update(num_ranks) == wanted
        return
    with pytest.raises(ConfigError, match=f"--global_batch_size {wanted} is not a multiple") as caught:
        options(wanted, at_once).samples_of_update(num_ranks)
    near = [int(word) for word in re.search(r"give ([\d or]+),", str(caught.value))[1].split(" or ")]
    assert 1 <= len(near) <= 2 and all(abs(size - wanted) < at_once * num_ranks for size in near)
    assert [options(size, at_once).samples_of_update(num_ranks) for size in near] == near


def test_without_it_the_accumulation_stands():
    arguments = TrainingOptions(output_dir="o", per_device_train_batch_size=3, gradient_accumulation_steps=5)
    assert (arguments.accumulation_for(2), arguments.samples_of_update(2)) == (5, 30)
