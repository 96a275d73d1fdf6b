"""Work in processes that may hang, die or fail: each task has its outcome, and no process is left."""

import pytest
from tasks import work

from ppldm.utils.errors import ConfigError, DataError, OutputError
from ppldm.utils.machine.resources import count_usable_cores
from ppldm.utils.processes.workers import check_workers, map_with_deadline


@pytest.mark.slow
def test_each_task_has_its_outcome(new_children):
    outcomes = dict(map_with_deadline(work, iter(["a", "die", "fail", "b"]), 3, 600))
    assert outcomes.pop("a") == "aa" and outcomes.pop("b") == "bb"
    assert "ended with status 7" in str(outcomes.pop("die"))
    assert isinstance(outcomes["fail"], OutputError) and str(outcomes.pop("fail")) == "no room"
    assert not outcomes
    ends = [str(outcome) for _, outcome in map_with_deadline(work, iter(["hang", "hang", "hang"]), 2, 0.6)]
    assert ends == ["it was killed after 1 s"] * 3 and not new_children()


@pytest.mark.slow
def test_processes_end_with_their_user(new_children):
    for _, outcome in map_with_deadline(work, iter(["hang", "die"]), 2, 60):
        assert isinstance(outcome, DataError)
        break
    assert not new_children()


@pytest.mark.parametrize("asked, given", [(0, count_usable_cores()), (1, 1), (7, 7)])
def test_no_number_of_workers_is_one_for_each_core(asked, given):
    assert check_workers(asked) == given
    with pytest.raises(ConfigError, match="--num-workers is -1; it must be 0"):
        check_workers(-1)
