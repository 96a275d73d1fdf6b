"""When to save and when to stop, told by one rule to both loops; and a Reporter that may be made at any time."""

from types import SimpleNamespace

import pytest

from ppldm.training.report import Reporter, Update
from ppldm.training.run_folder import Order
from ppldm.training.train import Updates
from ppldm.utils.processes.ranks import World

MAX_STEPS = 9


def follow(events: dict[int, str], periods=(3,), save_at=()) -> list[int]:
    """The steps that are saved of a run in which the updates of `events` are bad, or after which the user asks for
    something."""
    arguments = SimpleNamespace(save_steps=periods[0], backup_every=sum(periods[1:]), save_at=save_at, gc_steps=0)
    run = SimpleNamespace(world=World(), max_steps=MAX_STEPS, arguments=arguments, snapshots=None)
    updates = Updates.__new__(Updates)
    updates.run, updates._save_is_due = run, False
    updates.reporter = SimpleNamespace(after_update=lambda *facts: None)
    updates.guard, updates.request = SimpleNamespace(num_skipped_in_a_row=0), SimpleNamespace(number=0)
    saved = []
    for step in range(1, MAX_STEPS + 1):
        event = events.get(step, "")
        updates.guard.num_skipped_in_a_row = updates.guard.num_skipped_in_a_row + 1 if "bad" in event else 0
        orders = Order(sum(order for order in Order if order.file in event))
        save, stop = updates.finish(step, Update(0.0, 0.0, "stop" in event, orders=orders), [])
        assert stop == ("stop" in event or step == MAX_STEPS)
        saved += [step] * bool(save)
        assert bool(updates.request.number) == ("stop" in event)  # which is how a run says why it ends
        if stop:
            break
    return saved


@pytest.mark.parametrize(
    "events, saved",
    [
        ({}, [3, 6, 9]),
        ({3: "bad"}, [4, 6, 9]),  # a save that is due waits for a good update
        ({3: "bad", 4: "bad", 5: "bad"}, [6, 9]),  # and two that are due are one
        ({2: "bad"}, [3, 6, 9]),
        ({8: "bad", 9: "bad"}, [3, 6, 9]),  # the last is saved in any case
        ({5: "stop"}, [3, 5]),
        ({3: "bad", 4: "bad stop"}, [4]),
        ({6: "stop"}, [3, 6]),
        ({2: "save_now", 3: "save_now", 4: "sample_now"}, [2, 3, 6, 9]),  # asked for, and due as ever
        ({2: "bad save_now"}, [3, 6, 9]),  # the user's too waits for a good update
    ],
)
def test_when_a_run_is_saved(events, saved):
    assert follow(events) == saved


@pytest.mark.parametrize(
    "events, save_at, saved",
    [
        ({}, (0, 1, 6, 7, 100), [1, 3, 6, 7, 9]),
        ({1: "bad"}, (1,), [2, 3, 6, 9]),
        ({1: "bad", 2: "bad"}, (1,), [3, 6, 9]),
    ],
)
def test_single_updates_are_saved_beside_the_multiples(events, save_at, saved):
    assert follow(events, save_at=save_at) == saved


def test_a_reporter_touches_nothing_before_its_block(tmp_path):
    run = SimpleNamespace(interval=object())  # no folder, no arguments: they are asked when it begins
    assert Reporter(run).sinks == [] and not list(tmp_path.iterdir())
