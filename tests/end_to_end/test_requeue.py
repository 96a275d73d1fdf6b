"""A batch job with --overwrite_output_dir over its time limit and a lost machine: run_scripts/slurm and a real run.

Slurm's own programs, which no machine for tests has, are played: srun starts the step, scontrol notes the requeue.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\necho $$ > "$SAID/pid"\nexec "$@"\n'
SCONTROL = '#!/bin/bash\nif [ "$1" = show ]; then echo alpha; else echo "$@" >> "$SAID/requeued"; fi\n'

pytestmark = pytest.mark.slow


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [json.loads(line)["global_step"] for line in path.read_text().splitlines()] if path.is_file() else []


class Slurm:
    """Starts the job, and stops it as Slurm does."""

    def __init__(self, folder: Path, python: Path, flags: list[str]):
        self.folder, self.python, self.flags, self.count = folder, python, flags, 0
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(self, **changes) -> subprocess.Popen:
        environment = {
            **os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "SAID": str(self.folder),
            "SCRIPT": "run_single_no_trainer.sh", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "alpha",
            "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "OMP_NUM_THREADS": "1", "PYTHON": str(self.python),
            "PYTHONPATH": str(ROOT), **({"SLURM_RESTART_COUNT": str(self.count)} if self.count else {}), **changes,
        }  # fmt: skip
        self.count += 1
        log = open(self.folder / f"log-{self.count}", "w")  # noqa: SIM115 (the process's)
        command = ["bash", ROOT / "run_scripts/slurm/train.sbatch", *self.flags]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def signal(self, number: int) -> None:
        os.kill(int((self.folder / "pid").read_text()), number)

    def log(self, number: int) -> str:
        return (self.folder / f"log-{number}").read_text()


def wait_for(condition, process: subprocess.Popen, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.turn("a stopped run goes on", 1)
def test_a_job_that_begins_anew_does_so_once(tiny, tmp_path, programs):
    run = tmp_path / "run"
    settings = {"max_steps": 1_000_000, "save_steps": 5}
    slurm = Slurm(tmp_path, programs / "python", [*tiny.flags(run, **settings), "--overwrite_output_dir"])
    old = tiny.flags(run, max_steps=2, learning_rate=1e-4)
    subprocess.run(
        [sys.executable, ROOT / "examples/train_txt2img_laion400m_no_trainer.py", *old], check=True, cwd=ROOT
    )

    job = slurm.start()
    wait_for(lambda: len(steps(run)) > 12, job)
    slurm.signal(signal.SIGUSR1)
    assert job.wait(120) == 0 and (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert "resuming" not in slurm.log(1)
    reached = steps(run)[-1]
    assert (run / f"checkpoint-{reached}").is_dir()

    job = slurm.start()
    wait_for(lambda: len(steps(run)) > reached + 12, job)
    slurm.signal(signal.SIGKILL)
    assert job.wait(120) == 137
    assert f"resuming from {run}/checkpoint-{reached}" in slurm.log(2)
    assert "--overwrite_output_dir: the run in" in slurm.log(2)

    job = slurm.start()
    lost_at = steps(run)[-1]
    wait_for(lambda: steps(run)[-1] > lost_at + 5, job)
    slurm.signal(signal.SIGUSR1)
    assert job.wait(120) == 0
    last_saved = int(slurm.log(3).partition("checkpoint-")[2].split()[0])
    assert reached < last_saved <= lost_at
    assert steps(run) == list(range(1, steps(run)[-1] + 1))
