"""The scripts as users start them: two processes, Ctrl-C, and one line for each kind of bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from trained_here import train_here

ROOT = Path(__file__).resolve().parents[2]
LOOP = "examples/train_txt2img_laion400m_no_trainer.py"
TRAINER = "examples/train_txt2img_laion400m_trainer.py"
AUTOENCODER = "examples/train_autoencoder.py"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def python(programs, monkeypatch):
    """What the scripts start Python by."""
    monkeypatch.setenv("PYTHON", str(programs / "python"))


def environment(**changes) -> dict:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **changes}


def run(*command, **changes) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=300,
    )


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    train_here(tiny.flags(folder, per_device_train_batch_size=8))
    return folder


@pytest.mark.turn("a stopped run goes on", 1)
@pytest.mark.parametrize("script", ["run_multi_trainer.sh", "run_multi_no_trainer.sh"])
def test_two_processes_stopped_by_a_scheduler_go_on_and_are_one_with_twice_the_batch(
    tiny, one_process, tmp_path, script
):
    settings = {
        "BATCH_SIZE": "4", "GRADIENT_ACCUMULATION_STEPS": "1", "LEARNING_RATE": "1e-3", "WEIGHT_DECAY": "0.01",
        "LOGGING_STEPS": "1", "SEED": "5", "NUM_WORKERS": "1", "FILE_LIST": tiny.file_list,
        "TOKENIZER": tiny.tokenizer, "MODEL_MAX_LENGTH": "12", "OUTPUT_DIR": str(tmp_path / "run"), "NPROC": "2",
        "LAUNCH_LOG_DIR": str(tmp_path / "log"),
    }  # fmt: skip
    command = [
        "bash", f"run_scripts/{script}",
        "--vae_name_or_path", tiny.vae, "--text_encoder_config_file", tiny.config("ldmbert"),
        "--unet_config_file", tiny.config("unet"), "--resolution", "32",
        "--image_logging_steps", "0", "--report_to", "none",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**settings, MAX_STEPS="1000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == os.EX_TEMPFAIL, text
    assert "the same command again goes on there" in text and "Traceback" not in text
    reached = len(losses(tmp_path / "run"))
    steps = max(reached + 2, 4)
    result = run(*command, **settings, MAX_STEPS=str(steps))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"resuming from {tmp_path / 'run'}/checkpoint-{reached}" in result.stdout
    assert len(losses(tmp_path / "run")) == steps
    np.testing.assert_allclose(losses(tmp_path / "run")[:4], losses(one_process), rtol=1e-5)


@pytest.mark.parametrize("script", ["run_single_trainer.sh", "run_single_no_trainer.sh"])
def test_single_scripts_take_the_published_settings(tmp_path, script):
    # The published file list names parts that are not here: the command line was understood that far.
    result = run("bash", f"run_scripts/{script}", OUTPUT_DIR=str(tmp_path / "run"))
    assert result.returncode == 1
    assert "no such part file /data/laion400m/part-00000.gz" in result.stderr.splitlines()[-1]


@pytest.mark.turn("a stopped run goes on", 1)
@pytest.mark.parametrize("script, extra", [(LOOP, []), (TRAINER, ["--do_train"])])
def test_ctrl_c_saves_and_the_same_command_finishes(tiny, tmp_path, script, extra):
    settings = {"max_steps": 40, "use_ema": True}
    train_here(tiny.flags(tmp_path / "straight", **settings), loop=script == LOOP)
    command = [sys.executable, script, *extra]
    command += tiny.flags(tmp_path / "stopped", **settings, dataloader_num_workers=1)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 5):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 130, error
    assert "the same command again goes on there" in error and "Traceback" not in error
    assert len(losses(tmp_path / "stopped")) < 40
    assert run(*command).returncode == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")


@pytest.mark.cold
def test_autoencoder_script(tiny, tmp_path):
    flags = ["--output_dir", tmp_path / "run", "--file_list", tiny.file_list, "--vae_config_file", tiny.config("vae"),
             "--resolution", 32, "--train_batch_size", 4, "--gradient_accumulation_steps", 1, "--max_steps", 40,
             "--learning_rate", 3e-3, "--num_workers", 0, "--logging_steps", 10,
             "--image_logging_steps", 20]  # fmt: skip
    result = run(sys.executable, AUTOENCODER, *flags)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]
    psnr = [record["psnr"] for record in records if "psnr" in record]
    assert len(psnr) == 2 and psnr[1] > psnr[0]
    config = json.loads((tmp_path / "run/vae/config.json").read_text())
    facts = json.loads((tmp_path / "run/vae/ppldm.json").read_text())
    assert config["scaling_factor"] == pytest.approx(1 / facts["latent_std"])


def no_filelist(tiny, tmp_path):
    return {"file_list": tmp_path / "absent.filelist"}, "absent.filelist"


def empty_filelist(tiny, tmp_path):
    (tmp_path / "empty.filelist").touch()
    return {"file_list": tmp_path / "empty.filelist"}, "empty.filelist is empty"


def part_that_is_not_gzip(tiny, tmp_path):
    (tmp_path / "part-00000.gz").write_bytes(b"\x00\x01not gzip\n" * 9)
    (tmp_path / "a.filelist").write_text("part-00000.gz\n")
    return {"file_list": tmp_path / "a.filelist"}, "part-00000.gz"


def vae_without_config(tiny, tmp_path):
    (tmp_path / "vae").mkdir()
    return {"vae_name_or_path": tmp_path / "vae"}, "vae has no config.json"


def folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").touch()
    return {"output_dir": tmp_path / "file" / "run"}, "cannot write to the folder"


def tokenizer_that_is_not_there(tiny, tmp_path):
    return {"tokenizer_name": tmp_path / "none"}, "none"


def negative_seed(tiny, tmp_path):
    return {"seed": -1}, "--seed -1"


BAD_INPUT = [no_filelist, empty_filelist, part_that_is_not_gzip, vae_without_config, folder_that_cannot_be_written,
             tokenizer_that_is_not_there, negative_seed]  # fmt: skip


@pytest.mark.parametrize("make", BAD_INPUT)
@pytest.mark.parametrize("script, extra", [(LOOP, []), (TRAINER, ["--do_train"])])
def test_bad_input_is_one_line(tiny, tmp_path, make, script, extra):
    changes, expected = make(tiny, tmp_path)
    flags = tiny.flags(changes.pop("output_dir", tmp_path / "run"), **changes)
    result = run(sys.executable, script, *extra, *flags)
    assert result.returncode not in (0, None)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and expected in lines[0], result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == lines[0]


def test_debug_shows_the_traceback_too(tiny, tmp_path):
    result = run(sys.executable, LOOP, *tiny.flags(tmp_path / "run", file_list=tmp_path / "absent"), PPLDM_DEBUG="1")
    assert "Traceback" in result.stderr and result.stderr.splitlines()[-1].startswith("error: ")


def test_unknown_flag_names_the_nearest():
    result = run(sys.executable, LOOP, "--max_train_step", 3)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "error: unknown flag --max_train_step; did you mean --max_train_steps?"
