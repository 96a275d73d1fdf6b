"""What a run says of itself is true: the step of its weights, where it writes, its curve."""

import json
import os
import signal

import pytest
from command_line import parse_arguments

from ppldm.training.metrics import METRICS_FILE, read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.report import Reporter
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import ConfigError, DiskFullError, OutputError
from ppldm.utils.rng import MAX_SEED


def train(flags, kind="loop"):
    run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop"))
    (run_loop if kind == "loop" else run_trainer)(run)
    return run


def metadata(folder):
    return json.loads((folder / "pipeline" / "ppldm.json").read_text())


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_an_export_says_the_step_of_its_weights(tiny, tmp_path, kind):
    """Also where the budget was lowered below what is trained already."""
    train(tiny.flags(tmp_path, max_steps=4), kind)
    assert (metadata(tmp_path)["global_step"], metadata(tmp_path)["samples_seen"]) == (4, 16)
    assert train(tiny.flags(tmp_path, max_steps=3), kind).start_step == 4
    assert (metadata(tmp_path)["global_step"], metadata(tmp_path)["samples_seen"]) == (4, 16)
    assert (tmp_path / "model_state.pdparams").samefile(tmp_path / "checkpoint-4" / "model_state.pdparams")


@pytest.mark.parametrize("kind", ["loop", "trainer"])
@pytest.mark.parametrize("seed", [2**32, 2**63 - 1, 2**63, MAX_SEED])
def test_every_seed_trains(tiny, tmp_path, seed, kind):
    assert train(tiny.flags(tmp_path, max_steps=1, seed=seed), kind).identity["seed"] == seed


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 10**400])
def test_a_seed_beyond_64_bits_is_refused(tiny, tmp_path, seed):
    with pytest.raises(ConfigError, match=r"^--seed -?\d+ must be"):
        parse_arguments(tiny.flags(tmp_path, seed=seed), loop=True)


@pytest.mark.parametrize("flag, address", [("output_dir", "ftp://host/run"), ("logging_dir", "s3://bucket/run")])
@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_remote_folders_are_refused_by_name(tiny, tmp_path, flag, address, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{address} is an address, and ppldm reads and writes folders; mount it"):
        parse_arguments([*tiny.flags(tmp_path / "run"), f"--{flag}", address, "--do_train"], kind == "loop")
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_a_local_folder_is_that_folder(tiny, tmp_path):
    *_, arguments = parse_arguments(tiny.flags(f"file://{tmp_path}/run%201"), loop=True)
    assert arguments.output_dir == f"{tmp_path}/run 1" and str(arguments.log_folder) == f"{tmp_path}/run 1/logs"


def test_a_folder_that_cannot_be_is_said_in_a_line(tiny, tmp_path):
    with pytest.raises(OutputError, match="cannot write to the folder .*File name too long; choose another"):
        train(tiny.flags(tmp_path / ("x" * 300)))


@pytest.mark.parametrize("kind", ["loop", "trainer"])
@pytest.mark.parametrize("sent_before", ["update", "save"])
def test_a_signal_on_a_full_disk_is_an_error(tiny, tmp_path, kind, sent_before, monkeypatch, caplog):
    """What a stop promises, a checkpoint, is not there: no status that says so. A save that fails while training goes
    on is a warning, also where the signal came too late for the update before it."""
    free, after_update = iter([1 << 40, 0, 0]), Reporter.after_update

    def send(self, step, *arguments):
        after_update(self, step, *arguments)
        if step == (1 if sent_before == "update" else 2):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Reporter, "after_update", send)
    monkeypatch.setattr("ppldm.training.checkpoint.count_free_bytes", lambda _: next(free))
    stopped_at = 2 if sent_before == "update" else 3
    with pytest.raises(DiskFullError, match=f"checkpoint-{stopped_at} needs .* 0.000 GB free") as caught:
        train(tiny.flags(tmp_path, max_steps=5, save_steps=1), kind)
    assert caught.value.exit_status == 1
    assert ("update 2 is not saved, training goes on" in caplog.text) is (sent_before == "save")
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-1"]
    assert not json.loads((tmp_path / "start.json").read_text())["stopped"]


DAMAGES = {
    "not UTF-8": (lambda text: b"\xff\xfe" + text, "line 1 is not UTF-8 text"),
    "gone": (None, "is not there"),
    "cut": (lambda text: text[: text.index(b"\n") + 10], "ends at update 1"),
    "empty": (lambda text: b"", "ends at update 0"),
    "no numbers": (lambda text: b"[]\n" + text, "line 1 is not a line of metrics"),
    "a hole": (lambda text: text[: text.index(b"\n") + 1] + b"{]\n" + text[text.index(b"\n") + 1 :], "line 2 is not a"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_damaged_curve_does_not_block_and_is_said(tiny, tmp_path, damage, kind, caplog):
    train(tiny.flags(tmp_path, max_steps=3), kind)
    path = tmp_path / METRICS_FILE
    change, words = DAMAGES[damage]
    before = path.read_bytes()
    path.unlink() if change is None else path.write_bytes(change(before))
    caplog.clear()
    assert train(tiny.flags(tmp_path, max_steps=5), kind).start_step == 3
    warnings = [record.getMessage() for record in caplog.records if METRICS_FILE in record.getMessage()]
    assert len(warnings) == 1 and words in warnings[0], warnings
    steps = [record["global_step"] for record in read_metrics(path)]
    assert steps[-2:] == [4, 5] and steps == sorted(set(steps))
    if damage in ("not UTF-8", "no numbers", "a hole"):
        assert (tmp_path / f"damaged-{METRICS_FILE}").read_bytes() == change(before)


def test_a_whole_curve_is_no_matter(tiny, tmp_path, caplog):
    """Nor one whose last lines, after the checkpoint, are dropped, nor one that is logged seldom."""
    train(tiny.flags(tmp_path, max_steps=3, save_steps=2, logging_steps=2))
    (tmp_path / "checkpoint-3").rename(tmp_path / "away")
    caplog.clear()
    train(tiny.flags(tmp_path, max_steps=3, logging_steps=2))
    assert not [record for record in caplog.records if METRICS_FILE in record.getMessage()]
