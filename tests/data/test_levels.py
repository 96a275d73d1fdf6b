"""Laws of noise levels: how often each is drawn, and how evenly over a global batch."""

import itertools

import numpy as np
import pytest

from ppldm.data.inputs import Level, Strata
from ppldm.data.loader import BatchLoader
from ppldm.data.order import Mix, StepSampler
from ppldm.methods.levels.biased import Biased
from ppldm.methods.levels.logit_normal import LogitNormal
from ppldm.utils.processes.ranks import World
from ppldm.utils.rng import Generators, Stream

KEYS = [(0, row) for row in range(4000)]


def drawn(logit=None, stratified=False, strata=None, keys=KEYS, seed=7):
    law = logit and LogitNormal(*logit)
    return Level(Stream.TIMESTEP, 1000, law, stratified).draw(keys, (0, 0), Generators(seed), {}, strata)


def levels_of_run(batch, ranks, micro, start_step=0, steps=3, logit=None):
    """Of each update the levels of its samples, rank by rank."""
    samplers = [StepSampler(Mix([400], None, 5), batch, micro, World(rank, ranks), start_step, steps)
                for rank in range(ranks)]  # fmt: skip
    made = [[drawn(logit, True, sampler.strata(number), keys) for number, keys in enumerate(sampler)]
            for sampler in samplers]  # fmt: skip
    return np.concatenate([np.reshape(one, (steps - start_step, -1)) for one in made], axis=1)


@pytest.mark.parametrize("mean, deviation", [(0.0, 1.0), (1.2, 0.5), (-0.7, 2.0)])
@pytest.mark.parametrize("stratified", [False, True])
def test_the_logit_of_a_level_is_normal(mean, deviation, stratified):
    shares = (drawn((mean, deviation), stratified, Strata(3, 0, len(KEYS))) + 0.5) / 1000
    logits = np.log(shares / (1 - shares))
    tolerance = 0.02 if stratified else 5 * deviation / len(KEYS) ** 0.5
    assert np.median(logits) == pytest.approx(mean, abs=tolerance)
    quartiles = np.quantile(logits, [0.25, 0.75])
    np.testing.assert_allclose(quartiles, mean + deviation * np.array([-0.6745, 0.6745]), atol=2 * tolerance)


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 12, 30, 64, 100])
def test_each_part_of_the_levels_has_one_sample_of_a_global_batch(batch):
    for update in levels_of_run(batch, 1, batch):
        # In as many equal parts as samples, begun where the update's shift is.
        gaps = np.diff(np.sort(update), append=np.sort(update)[0] + 1000)
        assert len(update) == batch and abs(gaps - 1000 / batch).max() <= 1


@pytest.mark.parametrize("first, last, factor", [(0.75, 1, 2), (0, 0.25, 0.1), (0.2, 0.7, 40), (0, 1, 3)])
def test_biased_levels_are_so_many_times_as_often(first, last, factor):
    """As diffusers weighs 1,000 timesteps: `factor` from the first to the last, 1 elsewhere, divided by the sum."""
    levels = np.floor(Biased(first, last, factor)((np.arange(10**6) + 0.5) / 10**6) * 1000)
    weights = np.ones(1000)
    weights[round(first * 1000) : round(last * 1000)] = factor
    often = np.bincount(levels.astype(int), minlength=1000) / 1000
    assert often == pytest.approx(weights / weights.mean(), abs=0.002)
    assert levels.min() == 0 and levels.max() == 999
    assert np.nextafter(1.0, 0.0) >= Biased(first, last, factor)(np.array([np.nextafter(1.0, 0.0)])) > 0.99


@pytest.mark.parametrize("logit", [None, (0.0, 1.0)])
@pytest.mark.parametrize("ranks, micro", list(itertools.product([1, 2, 3, 4], [1, 2])))
def test_ranks_micro_batches_and_resuming_change_nothing(ranks, micro, logit):
    alone = levels_of_run(24, 1, 24, logit=logit)
    assert (levels_of_run(24, ranks, micro, logit=logit) == alone).all()
    assert (levels_of_run(24, ranks, micro, 2, logit=logit) == alone[2:]).all()
    assert len({tuple(sorted(update)) for update in alone}) == len(alone), "each update has a shift of its own"


@pytest.mark.parametrize("batch", [16, 60])
def test_neighbours_are_spread_too(batch):
    """A quarter of the batch, as a rank may have, leaves no gap much over the even one."""
    for update in levels_of_run(batch, 1, batch):
        for part in np.sort(update.reshape(4, -1)):
            assert np.diff(part, append=part[0] + 1000).max() <= 2.7 * 1000 / len(part)


def test_over_many_updates_all_levels_are_equally_often():
    levels = np.concatenate([drawn(None, True, Strata(step, 0, 4), KEYS[:4]) for step in range(5000)])
    counts = np.histogram(levels, 10, (0, 1000))[0]
    assert abs(counts - 2000).max() < 150 and levels.min() >= 0 and levels.max() < 1000


def test_without_an_update_a_level_is_the_row_s_own():
    assert (drawn(None, True) == drawn(None, False)).all() and len(set(drawn()[:50])) > 40
    assert (drawn(keys=KEYS[5:9]) == drawn()[5:9]).all()


@pytest.mark.parametrize("u, level", [(0.0, 0), (0.5, 500), (1 - 2**-53, 999)])
def test_no_number_leads_beyond_the_levels(u, level, monkeypatch):
    monkeypatch.setattr(Strata, "uniform", lambda *_: np.array([u]))
    strata = Strata(0, 0, 1)
    assert drawn(None, True, strata, KEYS[:1]) == drawn((0.0, 1000.0), True, strata, KEYS[:1]) == level


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_tells_where_samples_stand(make_dataset, workers):
    level = Level(Stream.TIMESTEP, 1000, None, True)
    dataset = make_dataset()
    dataset.inputs["timesteps"] = level
    sampler = StepSampler(Mix(dataset.list_sizes, None, 7), 4, 2, World(1, 2), 1, 4)
    found = [batch["timesteps"].numpy() for batch in BatchLoader(dataset, sampler, workers)]
    keys, generators = [(0, 0)] * 2, Generators(dataset.seed)
    expected = [level.draw(keys, (0, 0), generators, {}, Strata(step, 2, 4)) for step in (1, 2, 3)]
    np.testing.assert_array_equal(found, expected)
