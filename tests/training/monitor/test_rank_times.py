"""The rank that the others wait for is named: by its own seconds, once, and never for one slow moment."""

import paddle
import pytest

from ppldm.training.distributed import rank_checks as module
from ppldm.training.distributed.rank_checks import SLOW, ForwardTimer, SlowRanks


def find(*lines):
    """What is said at each log line; `lines` are seconds by rank."""
    ranks = SlowRanks()
    return [ranks.find([(one, f"host{rank}") for rank, one in enumerate(seconds)]) for seconds in lines]


@pytest.mark.parametrize("ratio, is_slow", [(SLOW + 0.01, True), (SLOW - 0.01, False)])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_named_at_the_second_line_in_a_row(ratio, is_slow, rank):
    seconds = [1.0] * 4
    seconds[rank] = ratio
    first, second, third = find(seconds, seconds, seconds)
    assert first == third == []
    assert len(second) == is_slow
    if is_slow:
        assert second[0].startswith(f"rank {rank} on host{rank} takes {ratio:.2f} times as long")


def test_one_slow_moment_is_none_and_a_second_time_is_told():
    slow, even = [1.0, 1.0, 2.0], [1.0, 1.0, 1.0]
    assert find(slow, even, slow, even) == [[]] * 4
    assert [len(said) for said in find(slow, slow, even, slow, slow)] == [0, 1, 0, 0, 1]


def test_of_two_ranks_the_slower_one_and_of_no_seconds_none():
    assert [len(said) for said in find([1.0, 2.0], [1.0, 2.0])] == [0, 1]
    assert find([0.0, 0.0], [0.0, 0.0]) == [[], []]


class Clock(paddle.nn.Layer):
    """A model whose forward pass takes as long as it is told, by a clock of its own."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def forward(self, seconds):
        self.now += seconds
        return seconds


def test_forward_passes_in_training_are_timed_while_asked_for(monkeypatch):
    model = Clock()
    monkeypatch.setattr(module, "time", model)
    timer = ForwardTimer(model)
    model(2.0)  # not asked for
    timer.is_on = True
    model(0.25)
    model(0.5)
    model.eval()
    model(8.0)  # a validation's
    assert timer.take() == 0.75 and timer.take() == 0
    model.train()
    timer.close()
    model(1.0)
    assert timer.take() == 0
