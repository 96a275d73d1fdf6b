"""A run on data of which too much is bad ends, at the same update whatever the ranks, loops and stops."""

import gzip
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from command_line import parse_arguments
from hypothesis import given
from hypothesis import strategies as st

from ppldm.data.filelist import write_filelist
from ppldm.training.prepare import prepare
from ppldm.training.report import LEAST_SAMPLES, WINDOW_SAMPLES, IntervalMetrics, SkippedShare, Update
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import CheckpointError, ConfigError, DataError
from ppldm.utils.processes.ranks import World
from ppldm.weights.folders import list_checkpoints

ROOT = Path(__file__).resolve().parents[3]
UPDATES = st.lists(st.tuples(st.sampled_from([1, 8, 99, 100, 400, 1000, 3000]), st.integers(0, 3000)), max_size=30)


def verdicts(updates, share):
    for samples, skipped in updates:
        share.add(samples, skipped)
        yield share.is_too_large


@given(UPDATES, st.sampled_from([0, 0.1, 0.5, 1]), st.integers(0, 30))
def test_the_share_is_of_the_newest_updates_that_fill_the_window(updates, limit, cut):
    expected = []
    for end in range(1, len(updates) + 1):
        window = next(
            (updates[start:end] for start in reversed(range(end))
             if sum(samples for samples, _ in updates[start:end]) >= WINDOW_SAMPLES),
            updates[:end],
        )  # fmt: skip
        samples, skipped = map(sum, zip(*window, strict=True))
        expected.append(samples >= LEAST_SAMPLES and skipped > limit * (samples + skipped))
    first = SkippedShare(limit)
    found = list(verdicts(updates[:cut], first))
    second = SkippedShare(limit, json.loads(json.dumps(first.state())))
    assert found + list(verdicts(updates[cut:], second)) == expected


def test_the_error_says_how_many_and_why():
    share = SkippedShare(0.25)
    assert not list(verdicts([(99, 99)], share))[-1] and list(verdicts([(1, 1)], share))[-1]
    text = "of the 200 rows .* last 100 samples, 100 .* 0.25 .*7 image, 2 base64"
    with pytest.raises(DataError, match=text) as caught:
        raise share.error(Counter({"base64": 2, "image": 7}))
    assert "\n" not in str(caught.value)


def test_an_interval_counts_every_update_and_its_state_goes_on():
    first = IntervalMetrics(World(), max_skipped_share=0.5)
    first.add(Update(float("nan"), 1.0, skipped_rows=90), 90)
    first.check_skipped()
    first.see({"skipped": ["image"] * 90})
    second = IntervalMetrics(World(), state=json.loads(json.dumps(first.state())), max_skipped_share=0.5)
    second.add(Update(1.0, 1.0, skipped_rows=11), 10)
    with pytest.raises(DataError, match="101 could not be used.*90 image"):
        second.check_skipped()
    old = {name: value for name, value in first.state().items() if name != "skipped_share"}
    IntervalMetrics(World(), state=old).check_skipped()


@pytest.fixture(scope="module")
def mostly_bad(tiny, tmp_path_factory):
    """400 rows of which one in fifty is good, and the number of samples after which a run must end."""
    folder = tmp_path_factory.mktemp("bad")
    line = gzip.decompress((tiny.folder / "part-00000.gz").read_bytes()).splitlines(keepends=True)[0]
    lines = [line if number % 50 == 0 else b"caption\n" for number in range(400)]
    (folder / "part").write_bytes(b"".join(lines))
    write_filelist(folder / "bad.filelist", ["part"])
    return folder / "bad.filelist"


def start(kind, tiny, folder, file_list, **changes):
    flags = tiny.flags(folder, file_list=file_list, logging_steps=1, **changes)
    run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop"))
    (run_loop if kind == "loop" else run_trainer)(run)


def end_of(kind, tiny, folder, file_list, **changes):
    """(update, message) of the end of a run."""
    with pytest.raises(DataError) as caught:
        start(kind, tiny, folder, file_list, **changes)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["global_step"] + 1, str(caught.value)


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_mostly_bad_rows_end_the_run_and_so_does_its_resume(tiny, tmp_path, mostly_bad, kind):
    settings = {"max_steps": 20, "save_steps": 2, "per_device_train_batch_size": 20, "max_skipped": 1000}
    step, message = end_of(kind, tiny, tmp_path / "run", mostly_bad, **settings)
    assert step == LEAST_SAMPLES // 20 and "--max_skipped_share" in message and "columns" in message
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-4", "checkpoint-2"]
    assert end_of(kind, tiny, tmp_path / "run", mostly_bad, **settings) == (step, message)
    with pytest.raises(CheckpointError, match="trained with max_skipped_share 0.5"):
        start(kind, tiny, tmp_path / "run", mostly_bad, **settings, max_skipped_share=1)
    start(kind, tiny, tmp_path / "run", mostly_bad, accept_changes="max_skipped_share",
          **{**settings, "max_steps": 6, "max_skipped_share": 1})  # fmt: skip


@pytest.mark.turn("what holds on one rank holds on two", 2)
@pytest.mark.slow
def test_two_ranks_end_at_the_update_at_which_one_does(tiny, tmp_path, mostly_bad):
    settings = {"max_steps": 20, "save_steps": 2, "max_skipped": 1000, "file_list": mostly_bad, "logging_steps": 1}
    step, message = end_of("loop", tiny, tmp_path / "one", mostly_bad, per_device_train_batch_size=20,
                           **{name: settings[name] for name in ("max_steps", "save_steps", "max_skipped")})  # fmt: skip
    flags = tiny.flags(tmp_path / "two", per_device_train_batch_size=10, **settings)
    script = str(ROOT / "examples/train_txt2img_laion400m_no_trainer.py")
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir",
               str(tmp_path / "log"), script, *flags]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, capture_output=True, timeout=400)
    for rank in range(2):
        assert message in (tmp_path / f"log/workerlog.{rank}").read_text()
    lines = (tmp_path / "two/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["global_step"] + 1 == step


@pytest.mark.parametrize("kind, workers", itertools.product(["loop", "trainer"], [0, 1]))
def test_no_skipped_row_is_allowed_with_max_skipped_0(tiny, tmp_path, mostly_bad, kind, workers):
    with pytest.raises(DataError, match=r"^bad row \(columns\): .*part row \d+"):
        start(kind, tiny, tmp_path, mostly_bad, max_steps=2, max_skipped=0, dataloader_num_workers=workers)


@pytest.mark.parametrize("flag, value", [("max_skipped", -1), ("max_skipped_share", 1.1), ("max_skipped_share", -0.1)])
def test_what_cannot_be_meant_is_refused(tiny, tmp_path, flag, value):
    with pytest.raises(ConfigError, match=f"--{flag} {value} must be"):
        parse_arguments(tiny.flags(tmp_path, **{flag: value}), True)
