"""A progress bar follows work that reports in numbers alone, and ends with it; what a line quotes is harmless."""

import re
import threading
from contextlib import nullcontext
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import tasks

from ppldm.utils import log
from ppldm.utils.log import get_logger, logging_to
from ppldm.utils.processes.workers import map_with_deadline


def test_a_bar_follows_what_is_measured_and_never_passes_the_total(monkeypatch):
    bars, enough = [], threading.Event()
    states = chain([(1, 4), (3, 8), (2, 8)], repeat((99, 8)))
    num_asked = 0

    def measure():
        nonlocal num_asked
        num_asked += 1
        if num_asked > 5:
            enough.set()
        seen.append(bars[0].n)
        return next(states)

    seen, make = [], log.progress
    monkeypatch.setattr(log, "_FOLLOW_SECONDS", 0.001)
    monkeypatch.setattr(log, "progress", lambda **options: bars.append(make(disable=False, **options)) or bars[-1])
    with log.following(measure, desc="work", unit="row"):
        assert enough.wait(30)
    assert seen[:5] == [0, 1, 3, 3, 8] and bars[0].n == bars[0].total == 8
    before = set(threading.enumerate())
    with pytest.raises(KeyError), log.following(measure):
        raise KeyError
    assert set(threading.enumerate()) <= before  # nobody asks any more


def test_a_slow_first_step_is_not_in_the_time_left(monkeypatch):
    now = [1000.0]
    with log.progress(total=100, initial=40, disable=False, delay=0, mininterval=0.5) as bar:
        monkeypatch.setattr(bar, "_time", lambda: now[0])
        bar.start_t = bar.last_print_t = now[0]
        now[0] += 300
        log.leave_out_next_step(bar)
        bar.update()
        for _ in range(9):
            now[0] += 2
            bar.update()
        told = bar.format_dict
        assert told["n"] == 50 and (told["n"] - told["initial"]) / told["elapsed"] == pytest.approx(0.5)
        assert told["rate"] is None or told["rate"] == pytest.approx(0.5)
    log.leave_out_next_step(log.progress(total=1, disable=True))


def test_lines_and_names_of_bars_are_escaped_and_cut(capsys):
    log.get_logger().warning("%s\n  two 图", "\x1b[2J" + "x" * 10**5)
    with log.progress(total=1, desc="\x1b]0;t\x07", delay=0, mininterval=0) as bar:
        bar.update()
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and "\x07" not in shown
    assert "\\u001b[2J" in shown and "\n  two 图\n" in shown and "\\u001b]0;t" in shown
    assert max(map(len, shown.splitlines())) <= 2000


def test_a_bar_within_another_moves_no_cursor_in_a_log(capsys):
    with log.progress(total=1, desc="outer", delay=0) as outer:
        outer.update()
        with log.progress(total=1, desc="inner", delay=0) as inner:
            inner.update()
    shown = capsys.readouterr().err
    assert "outer" in shown and "inner" in shown and "\x1b" not in shown


@pytest.mark.slow
def test_what_a_worker_prints_is_escaped(capfd):
    assert list(map_with_deadline(tasks.print_it, ["\x1b[2J"], 1, 60)) == [("\x1b[2J", 1)]
    shown = capfd.readouterr().err
    assert "\x1b" not in shown and shown.count("\\u001b[2J") == 2


def test_lines_go_to_the_end_of_a_file_with_their_rank_too(tmp_path, capsys):
    """Over several starts; and where nothing can be written, the work goes on."""
    for rank, words in ((0, "one\x1b"), (3, "two")):
        with logging_to(tmp_path / "logs.txt", rank):
            get_logger().info(words)
    get_logger().info("three")
    lines = (tmp_path / "logs.txt").read_text().splitlines()
    assert [re.sub(r"^[-0-9]+ [:,0-9]+ ", "", line) for line in lines] == ["[0] INFO one\\u001b", "[3] INFO two"]
    for path in ("/dev/full", tmp_path / "none/logs.txt"):
        with logging_to(path, 0):
            get_logger().info("four")
    assert "Traceback" not in (told := capsys.readouterr().err) and told.count("four") == 2


def test_a_training_keeps_its_lines_in_its_folder(tmp_path, monkeypatch):
    from ppldm.training import train

    monkeypatch.setattr(train, "look_quickly", lambda training: None)
    monkeypatch.setattr(train, "refusals_undone", lambda training: nullcontext())
    monkeypatch.setattr(train, "prepare", lambda *settings: run)
    run = SimpleNamespace(output_dir=tmp_path, world=SimpleNamespace(rank=1))
    for words in ("first", "second"):
        recipe = SimpleNamespace(model=None, data=None, training=None)
        train.train_recipe(recipe, lambda _, words=words: get_logger().info(words))
    assert [line.rpartition("] ")[2] for line in (tmp_path / "logs.txt").open()] == ["INFO first\n", "INFO second\n"]
