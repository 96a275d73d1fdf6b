"""The quickstart's plan: what its flags come to, and that it needs Python alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppldm.config.load import file_layers, last_value, preset_path
from ppldm.demo import quickstart
from ppldm.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("/out")


def values(command, flag: str) -> list[str]:
    """The values that a flag has on a command line."""
    return [after for word, after in zip(command, command[1:], strict=False) if word == f"--{flag}"]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_global_batch_is_the_same_for_any_number_of_processes(processes):
    _, autoencoder, diffusion, *_ = quickstart.plan(OUT, 7, 9, processes)
    for stage, steps, batch in ((autoencoder, "9", 4), (diffusion, "7", 16)):
        (size,) = values(stage.command, "per_device_train_batch_size")
        assert int(size) * processes == batch
        assert values(stage.command, "max_steps") == [steps]
        assert values(stage.command, "nproc_per_node") == [str(processes)] * (processes > 1)


def test_each_stage_writes_to_a_folder_of_its_name_and_logs_to_one_of_its_own():
    stages = quickstart.plan(OUT, 1, 1, 2)
    for stage in stages[:-1]:
        assert [*values(stage.command, "out"), *values(stage.command, "output_dir")] == [f"{OUT}/{stage.name}"]
    logs = [log for stage in stages for log in values(stage.command, "log_dir")]
    assert len(set(logs)) == 2 and all(log.startswith(f"{OUT}/log/") for log in logs)


def test_the_autoencoder_is_the_packages_unless_it_is_trained():
    names = [stage.name for stage in quickstart.plan(OUT, 7, 0, 1)]
    assert names == ["data", "diffusion", "pictures", "curve"]
    (diffusion,) = (stage for stage in quickstart.plan(OUT, 7, 0, 1) if stage.name == "diffusion")
    assert not values(diffusion.command, "vae_name_or_path")
    _, autoencoder, diffusion, *_ = quickstart.plan(OUT, 7, 9, 1)
    assert values(diffusion.command, "vae_name_or_path") == [f"{OUT}/autoencoder/vae"]
    assert autoencoder.name == "autoencoder"


@pytest.mark.parametrize(
    "flags, steps", [([], []), (["--train-autoencoder"], ["2000"]), (["--autoencoder-steps", "9"], ["9"])]
)
def test_the_flags_say_whether_it_is_trained(flags, steps, capsys):
    quickstart.quickstart([*flags, "--dry-run"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "autoencoder-tiny-cpu" in line]
    assert [value for line in lines for value in values(line, "max_steps")] == steps


def test_a_stage_that_trains_knows_what_its_newest_checkpoint_saves(tmp_path):
    stages = {stage.name: stage for stage in quickstart.plan(tmp_path, 1400, 2000, 2)}
    assert stages["diffusion"].share_done() == stages["autoencoder"].share_done() == 0
    for folder in ("diffusion/checkpoint-350", "diffusion/checkpoint-90", "autoencoder/checkpoint-2000"):
        (tmp_path / folder).mkdir(parents=True)
    assert (stages["diffusion"].share_done(), stages["autoencoder"].share_done()) == (0.25, 1)


def test_a_training_says_when_it_draws_samples():
    for stage in quickstart.plan(OUT, 100, 100, 1):
        if stage.updates:
            preset = stage.command[stage.command.index("--preset") + 1]
            every = last_value(file_layers(preset_path(preset)), "validation.image_logging_steps")
            assert stage.title.endswith(f", samples every {every}")


def test_more_updates_take_more_time():
    short, long = ([stage.seconds for stage in quickstart.plan(OUT, n, n, 2)] for n in (100, 1000))
    assert [a < b for a, b in zip(short, long, strict=True)] == [False, True, True, False, False]


@pytest.mark.parametrize("processes", [3, 8])
def test_a_number_of_processes_that_does_not_divide_the_batch_is_refused(processes):
    with pytest.raises(ConfigError, match=f"--processes {processes}: .* wants 1, 2 or 4"):
        quickstart.plan(OUT, 1, 1, processes)


@pytest.mark.parametrize("flags, lines", [(["--dry-run"], 8), (["--help"], 15)])
def test_showing_the_plan_needs_python_alone(tmp_path, flags, lines):
    # -S: without the packages of this Python.
    done = subprocess.run([sys.executable, "-S", "-m", "ppldm.demo.quickstart", *flags], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= lines and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--setps", "3"], "unknown flag --setps; did you mean --steps?"),
        (["--steps", "many"], "many: a whole number"),
        (["--steps", "0"], "0: a whole number of at least 1"),
        (["--steps"], "--steps: expected one argument"),
        (["--out="], "--out: the name of a folder"),
        (["--processes", "3"], "--processes 3"),
    ],
)
def test_wrong_flags_are_refused(flags, words):
    with pytest.raises(ConfigError) as caught:
        quickstart.quickstart([*flags, "--dry-run"])
    assert words in str(caught.value)


def test_a_folder_is_the_callers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quickstart.quickstart(["--dry-run", "--out", "mine"])
    assert f"--out {tmp_path}/mine/pictures" in capsys.readouterr().out
