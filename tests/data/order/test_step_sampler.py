import itertools

import pytest

from ppldm.data.order import Mix, StepSampler
from ppldm.utils.errors import ConfigError, DataError
from ppldm.utils.processes.ranks import World


def flat(sampler):
    return [sample for micro_batch in sampler for sample in micro_batch]


@pytest.mark.parametrize("weights, ranks, micro", list(itertools.product([None, [0.2, 0.8]], [1, 2, 3, 4], [1, 2])))
def test_ranks_share_each_global_batch_and_their_number_changes_nothing(weights, ranks, micro):
    mix, batch, steps = Mix([30, 47], weights, 5), 24, 10
    alone = list(StepSampler(mix, batch, batch, World(), 0, steps))
    shares = [list(StepSampler(mix, batch, micro, World(rank, ranks), 0, steps)) for rank in range(ranks)]
    per_step = batch // ranks // micro
    for step in range(steps):
        joined = [s for share in shares for m in share[step * per_step : (step + 1) * per_step] for s in m]
        assert joined == alone[step] and len(set(joined)) == batch
    assert all(len(m) == micro for share in shares for m in share)
    assert {len(share) for share in shares} == {len(StepSampler(mix, batch, micro, World(0, ranks), 0, steps))}


@pytest.mark.parametrize("start_step", [0, 1, 7, 10, 12])
def test_resuming_gives_the_rest_of_the_run(start_step):
    mix = Mix([30, 47], None, 5)
    whole = list(StepSampler(mix, 8, 2, World(1, 2), 0, 10))
    resumed = StepSampler(mix, 8, 2, World(1, 2), start_step, 10)
    assert list(resumed) == list(resumed) == whole[2 * start_step :] and len(resumed) == len(list(resumed))


def test_the_batch_that_ends_an_epoch_is_filled_from_the_next():
    samples = flat(StepSampler(Mix([10], None, 5), 4, 4, World(), 0, 5))
    assert [epoch for epoch, _ in samples] == [0] * 10 + [1] * 10
    assert sorted(samples) == list(itertools.product([0, 1], range(10)))


@pytest.mark.parametrize("batch, micro, ranks", [(10, 4, 1), (10, 5, 4), (8, 3, 2), (0, 1, 1), (4, 0, 1)])
def test_a_batch_that_cannot_be_cut_is_refused(batch, micro, ranks):
    with pytest.raises(ConfigError, match=f"{batch} rows .* {micro} on {ranks}"):
        StepSampler(Mix([100], None, 5), batch, micro, World(0, ranks), 0, 1)


def test_as_many_rows_as_a_batch_are_enough():
    samples = flat(StepSampler(Mix([3, 5], None, 5), 8, 4, World(), 0, 2))
    assert [sorted(row for _, row in samples[start : start + 8]) for start in (0, 8)] == [list(range(8))] * 2


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(DataError, match="7 rows, fewer than one global batch of 8"):
        StepSampler(Mix([3, 4], None, 5), 8, 1, World(0, 8), 0, 1)
