"""Checkpoints that are written beside the training: one at a time, and none forgotten."""

import threading

import pytest

from ppldm.training.run import BackgroundSaves


def test_one_at_a_time_and_the_end_waits():
    events, may_end = [], threading.Event()

    def first():
        may_end.wait(10)
        events.append("first")

    with BackgroundSaves() as saves:
        saves.start(first)
        assert events == []
        threading.Timer(0.05, may_end.set).start()
        saves.start(lambda: events.append("second"))
        assert events[:1] == ["first"]
    assert events == ["first", "second"]


@pytest.mark.parametrize("asked_by", ["wait", "start", "end"])
def test_what_a_save_raises_is_not_lost(asked_by):
    def fails():
        raise OSError("no such disk")

    with pytest.raises(OSError, match="no such disk"), BackgroundSaves() as saves:
        saves.start(fails)
        if asked_by == "start":
            saves.start(print)
        elif asked_by == "wait":
            saves.wait()
