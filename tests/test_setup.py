"""setup.py, the lock and the table of `ppldm env` say the same; the scripts parse, find a Python and stop."""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ppldm.utils.environment import KNOWN_BAD, PINS

ROOT = Path(__file__).resolve().parents[1]
LOCKED_EXTRAS = ("cpu", "demo", "test")
PYTHONS = ("3.10", "3.11", "3.12")


@pytest.fixture(scope="module")
def declared():
    """The arguments that setup.py gives to setuptools.setup."""
    arguments = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", arguments.update)
        runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def lock_for(python: str) -> dict[str, str]:
    """Package to version, for one Python on Linux. Fails on a line that is no exact pin, or pins twice."""
    target = {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": "linux"}
    versions = {}
    for line in (ROOT / "requirements/lock.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert pin.operator == "==" and not requirement.extras and not requirement.url, line
        if requirement.marker is None or requirement.marker.evaluate(target):
            assert requirement.name not in versions, line
            versions[requirement.name] = pin.version
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_satisfies_setup(declared, python):
    lock = lock_for(python)
    wanted = declared["install_requires"] + [r for extra in LOCKED_EXTRAS for r in declared["extras_require"][extra]]
    for requirement in map(Requirement, wanted):
        version = lock[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} but {version} is locked"


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_leaves_out_what_needs_more_than_a_slim_machine(python):
    assert not {"opencv-python", "ligo-segments", "torch", "paddlepaddle-gpu"} & lock_for(python).keys()


def test_every_extra_is_declared(declared):
    assert declared["extras_require"].keys() == {
        *("cpu", "gpu", "data", "demo", "tensorboard", "wandb", "test", "parity")
    }
    assert declared["entry_points"]["console_scripts"] == ["ppldm = ppldm.cli:main"]


@pytest.mark.parametrize("python", PYTHONS)
def test_setup_excludes_what_env_calls_broken_and_admits_what_it_pins(declared, python):
    extras = declared["extras_require"]
    bounds = {canonicalize_name(r.name): r.specifier for r in map(Requirement, declared["install_requires"])}
    bounds |= {r.name: r.specifier for r in map(Requirement, extras["cpu"] + extras["gpu"])}
    lock = lock_for(python)
    for name, pin in PINS.items():
        assert lock[name] in SpecifierSet(pin, prereleases=True), name
    for known in KNOWN_BAD:
        for bad in SpecifierSet(known.versions):
            edge = bad.version
            assert bad.operator == "<" or not bounds[known.package].contains(edge, prereleases=True), known


@pytest.mark.parametrize(
    "script", sorted((ROOT / "run_scripts").rglob("*.s[hb]*")) + [ROOT / ".ci/run"], ids=lambda p: p.name
)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


def run_script(*command, **variables):
    """Run a command with the given changes of the environment; its exit status, stdout and stderr."""
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


QUICKSTART = ROOT / "run_scripts/quickstart.sh"


def test_dry_run_prints_the_commands_and_does_nothing(tmp_path):
    venv, out = tmp_path / "venv", tmp_path / "out"
    variables = {"PPLDM_VENV": str(venv), "PYTHON": sys.executable}
    status, stdout, _ = run_script("bash", QUICKSTART, "--dry-run", "--steps", "7", "--out", out, **variables)
    assert status == 0
    assert not venv.exists() and not out.exists()
    commands = [line for line in stdout.splitlines() if not line.startswith("#")]
    assert len(commands) == 7 and str(out) in commands[-1]
    assert "train_txt2img_laion400m_trainer.py" in commands[4] and "--max_steps 7 " in commands[4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--setps", "3"], "unknown flag --setps"),
        (["--steps", "many"], "whole number"),
        (["--steps"], "--steps needs a value"),
        (["--out="], "--out needs"),
    ],
)
def test_quickstart_refuses_bad_flags_in_one_line(arguments, words):
    status, _, stderr = run_script("bash", QUICKSTART, *arguments)
    assert status == 1 and words in stderr and stderr.count("\n") == 1


def test_no_fitting_python_names_the_versions_and_the_remedy(tmp_path):
    for tool in ("bash", "dirname", "cat", "df", "awk", "mkdir"):
        (tmp_path / tool).symlink_to(Path("/bin", tool) if Path("/bin", tool).exists() else Path("/usr/bin", tool))
    variables = {"PATH": str(tmp_path), "PPLDM_VENV": str(tmp_path / "venv"), "PYTHON": ""}
    status, _, stderr = run_script("bash", ROOT / "run_scripts/test.sh", **variables)
    assert status == 1 and "3.10, 3.11 or 3.12" in stderr and "apt install" in stderr
    status, _, stderr = run_script("bash", ROOT / "run_scripts/test.sh", **{**variables, "PYTHON": "/bin/false"})
    assert status == 1 and "PYTHON=/bin/false" in stderr


@pytest.fixture
def fake_run(tmp_path):
    """A copy of the scripts whose environment is ready-made: its `python` notes its arguments, and may be slow."""
    root, venv = tmp_path / "repo", tmp_path / "venv"
    (root / "requirements").mkdir(parents=True)
    (root / "run_scripts").mkdir()
    (venv / "bin").mkdir(parents=True)
    for name in ("setup.py", "requirements/lock.txt", "run_scripts/lib.sh", "run_scripts/quickstart.sh"):
        (root / name).write_text((ROOT / name).read_text())
    python = venv / "bin/python"
    python.write_text(
        f"""#!/usr/bin/env bash
if [[ $1 == --version || $1 == -c ]]; then exit 0; fi
echo "$@" >>{tmp_path}/calls
if [[ -e {tmp_path}/fail ]]; then exit 3; fi
if [[ -e {tmp_path}/slow ]]; then trap 'sleep 0.3; echo stopped >>{tmp_path}/calls; exit 130' TERM; sleep 60 & wait; fi
"""
    )
    python.chmod(0o755)
    variables = {**os.environ, "PPLDM_VENV": str(venv)}
    stamp = subprocess.run(
        ["bash", "-c", f"source {root}/run_scripts/lib.sh; environment_stamp"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    (venv / "ppldm.stamp").write_text(stamp.stdout)
    command = ["bash", str(root / "run_scripts/quickstart.sh"), "--out", str(tmp_path / "out")]
    return tmp_path, command, variables


def calls(folder):
    path = folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_finished_stages_are_skipped_and_later_ones_follow_an_earlier_one(fake_run):
    folder, command, variables = fake_run
    run = lambda *more: subprocess.run([*command, *more], env=variables, capture_output=True, text=True)  # noqa: E731
    first = run()
    assert first.returncode == 0 and len(calls(folder)) == 5, first.stderr
    for name in ("data", "autoencoder", "diffusion"):
        (folder / "out" / name).mkdir()
    assert str(folder / "out/pictures") in first.stderr
    again = run()
    assert again.returncode == 0 and calls(folder) == []
    assert again.stderr.count("done before") == 5
    assert run("--steps", "9").returncode == 0
    rerun = calls(folder)
    assert len(rerun) == 3 and "train_txt2img_laion400m_trainer.py" in rerun[0]
    # Another number of steps is another run: nothing of the first one may be resumed.
    assert sorted(path.name for path in (folder / "out").iterdir()) == [".done", "autoencoder", "data"]


def test_a_failed_stage_stops_the_rest_and_is_run_again(fake_run):
    folder, command, variables = fake_run
    (folder / "fail").touch()
    failed = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert failed.returncode == 1 and "stage 1 (data) failed" in failed.stderr and len(calls(folder)) == 1
    (folder / "fail").unlink()
    assert subprocess.run(command, env=variables, capture_output=True).returncode == 0
    assert len(calls(folder)) == 5


@pytest.mark.parametrize("to_group", [False, True], ids=["script alone", "as Ctrl-C does"])
def test_a_signal_stops_the_stage_first_and_then_the_script(fake_run, to_group):
    folder, command, variables = fake_run
    (folder / "slow").touch()
    process = subprocess.Popen(
        command,
        env=variables,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run that was itself started in the background hands down an ignored SIGINT, which bash cannot trap.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 20
    while not (folder / "calls").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "the same command again" in stderr
    assert calls(folder)[1:] == ["stopped"]


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=1
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'alpha\\nbeta\\n'; else echo "$@" > "$SAID/requeue"; fi
"""
TRAINING = """echo "$MASTER $NNODES $NODE_RANK $*" > "$SAID/started"; exit "$STATUS"
"""


@pytest.mark.parametrize("status", [0, 2, 75])
def test_a_slurm_job_is_queued_again_where_training_was_stopped(tmp_path, status):
    # Stand-ins for Slurm's own programs, which no machine for tests has.
    for name, text in {"bin/srun": SRUN, "bin/scontrol": SCONTROL, "run_scripts/mine.sh": TRAINING}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    result = subprocess.run(
        ["bash", ROOT / "run_scripts/slurm/train.sbatch", "--recompute", "--x", "a b"],
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SAID": str(tmp_path), "STATUS": str(status),
             "SCRIPT": "mine.sh", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "alpha,beta",
             "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (tmp_path / "started").read_text() == "alpha:20007 2 1 --recompute --x a b\n"
    if status == 75:
        assert (tmp_path / "requeue").read_text() == "requeue 7\n"
    else:
        assert result.returncode == status and not (tmp_path / "requeue").exists()
