"""The queue: jobs are drawn in their order, one at a time, each ends once, and what is kept is bounded."""

import random
import threading
import time

import numpy as np
import pytest

from ppldm.inference.serving.jobs import (
    CANCELLED,
    DONE,
    DRAWING,
    ENDED,
    FAILED,
    FAILED_INSIDE,
    WAITING,
    Pictures,
    Queue,
    QueueFullError,
    StoppingError,
)
from ppldm.utils.errors import ModelError

STEPS = 3


class Drawn:
    """A drawing that takes as long as the test wants, and says what it saw."""

    def __init__(self, gated=False):
        self.order, self.at_once, self.most_at_once = [], 0, 0
        self.gate = threading.Event()
        if not gated:
            self.gate.set()

    def __call__(self, job, tell):
        self.order.append(job.id)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            for step in range(1, STEPS + 1):
                assert self.gate.wait(30)
                tell(step, np.full((2, 2, 3), step, np.uint8))
            if error := job.settings.get("error"):
                raise error
            for _ in range(job.settings.get("pictures", 1)):
                yield b"p" * job.settings.get("bytes", 10)
        finally:
            self.at_once -= 1


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def ended(*jobs):
    wait_for(lambda: all(job.state in ENDED for job in jobs))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_cancelled_the_rest_is_drawn_in_order(seed):
    rng, draw = random.Random(seed), Drawn(gated=True)
    queue = Queue(draw, Pictures(), most_waiting=100)
    jobs = [queue.add({"pictures": rng.randrange(3)}, STEPS) for _ in range(40)]
    wait_for(lambda: jobs[0].state == DRAWING)
    assert [queue.place(job) for job in jobs] == list(range(40))
    unwanted = set(rng.sample(jobs[1:], 15))
    for job in unwanted:
        queue.cancel(job)
        assert job.state == CANCELLED
    rest = [job for job in jobs if job not in unwanted]
    assert [queue.place(job) for job in rest] == list(range(25))
    draw.gate.set()
    ended(*jobs)
    assert draw.order == [job.id for job in rest] and draw.most_at_once == 1
    for job in rest:
        assert (job.state, job.step, job.preview) == (DONE, STEPS, None)
        assert job.num_pictures == job.settings["pictures"]
        assert all(queue.pictures.get(queue.picture_name(job, n)) == b"p" * 10 for n in range(job.num_pictures))
    assert queue.counts[DONE] == 25 and queue.counts[CANCELLED] == 15 and queue.counts["steps"] == 25 * STEPS
    queue.stop()


def test_a_drawing_that_is_cancelled_ends_at_its_next_step():
    draw = Drawn(gated=True)
    queue = Queue(draw, Pictures())
    first, second = queue.add({}, STEPS), queue.add({}, STEPS)
    wait_for(lambda: first.state == DRAWING)
    queue.cancel(first)
    assert first.state == DRAWING
    draw.gate.set()
    ended(first, second)
    assert (first.state, first.step, first.num_pictures) == (CANCELLED, 1, 0) and second.state == DONE
    queue.cancel(second)
    assert queue.get(second.id) is None and queue.pictures.bytes == 0
    queue.stop()


def test_a_full_queue_takes_no_more_until_one_has_left():
    draw = Drawn(gated=True)
    queue = Queue(draw, Pictures(), most_waiting=3)
    jobs = [queue.add({}, STEPS)]
    wait_for(lambda: jobs[0].state == DRAWING)
    jobs += [queue.add({}, STEPS) for _ in range(3)]
    with pytest.raises(QueueFullError, match="the queue is full: at most 3 may wait"):
        queue.add({}, STEPS)
    queue.cancel(jobs[2])
    jobs.append(queue.add({}, STEPS))
    draw.gate.set()
    ended(*jobs)
    assert queue.counts["refused"] == 1 and queue.counts[DONE] == 4
    queue.stop()


@pytest.mark.parametrize(
    "error, said", [(ModelError("a sentence"), "a sentence"), (1, FAILED_INSIDE), (MemoryError(), FAILED_INSIDE)]
)
def test_one_failure_is_not_the_end_of_the_others(error, said):
    queue = Queue(Drawn(), Pictures())
    failed, fine = queue.add({"error": error}, STEPS), queue.add({}, STEPS)
    ended(failed, fine)
    assert (failed.state, failed.error, fine.state) == (FAILED, said, DONE) and queue.worker.is_alive()
    queue.stop()


def test_what_is_kept_is_bounded():
    queue = Queue(Drawn(), Pictures(most_bytes=1000), most_waiting=500, most_ended=20)
    picture = np.zeros((64, 64, 3), np.uint8)
    jobs = [queue.add({"pictures": 3, "bytes": 100}, STEPS, plan=picture) for _ in range(200)]
    ended(*jobs)
    assert queue.pictures.bytes == 1000 and len(queue.jobs()) == 20 and queue.jobs() == jobs[-20:]
    held = [queue.pictures.get(queue.picture_name(job, n)) is not None for job in jobs for n in range(3)]
    assert held == [False] * 590 + [True] * 10
    assert all(job.plan is None for job in jobs)
    queue.stop()


def test_pictures_in_a_folder_take_no_memory_and_stay(tmp_path):
    queue = Queue(Drawn(), Pictures(tmp_path / "out", most_bytes=1), most_ended=2)
    jobs = [queue.add({"pictures": 2}, STEPS) for _ in range(5)]
    ended(*jobs)
    assert queue.pictures.bytes == 0 and len(list((tmp_path / "out").glob("*.png"))) == 10
    assert queue.pictures.get(queue.picture_name(jobs[-1], 1)) == b"p" * 10
    assert queue.pictures.get("nothing.png") is None
    queue.stop()


def test_stopping_finishes_what_is_drawn_and_nothing_else():
    draw = Drawn(gated=True)
    queue = Queue(draw, Pictures())
    jobs = [queue.add({}, STEPS) for _ in range(3)]
    wait_for(lambda: jobs[0].state == DRAWING)
    stopping = threading.Thread(target=queue.stop)
    stopping.start()
    wait_for(lambda: queue.is_stopping)
    with pytest.raises(StoppingError):
        queue.add({}, STEPS)
    wait_for(lambda: jobs[1].state == CANCELLED)
    draw.gate.set()
    stopping.join(30)
    assert [job.state for job in jobs] == [DONE, CANCELLED, CANCELLED] and "stopped" in jobs[1].error
    assert not queue.worker.is_alive() and WAITING not in [job.state for job in jobs]
