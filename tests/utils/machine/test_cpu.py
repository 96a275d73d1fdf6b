import os
import subprocess
import sys

import pytest

from ppldm.utils.machine import cpu
from ppldm.utils.machine.cpu import choose_variables

pytestmark = pytest.mark.cold


@pytest.mark.parametrize("num_cores", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("num_local_ranks", [0, 1, 2, 8])
@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel", ""])
def test_ranks_share_the_cores(num_cores, num_local_ranks, vendor):
    chosen = choose_variables({}, num_cores, num_local_ranks, vendor)
    threads = int(chosen["OMP_NUM_THREADS"])
    assert threads >= 1
    assert threads * max(1, num_local_ranks) <= max(num_cores, num_local_ranks)
    assert (threads + 1) * max(1, num_local_ranks) > num_cores
    assert ("MKL_DEBUG_CPU_TYPE" in chosen) == (vendor == "AuthenticAMD")


def test_what_the_user_set_stays():
    environ = {"OMP_NUM_THREADS": "3", "MKL_DEBUG_CPU_TYPE": "4"}
    assert choose_variables(environ, 8, 1, "AuthenticAMD") == {}
    assert choose_variables({"OMP_NUM_THREADS": "3"}, 8, 1, "AuthenticAMD") == {"MKL_DEBUG_CPU_TYPE": "5"}


def run_prepare(**variables):
    """stdout and stderr of a process that prepares the CPU and prints its OMP_NUM_THREADS and warnings."""
    program = (
        "import os, warnings\n"
        "from ppldm.utils.machine.cpu import prepare_cpu\n"
        "prepare_cpu()\n"
        "warnings.warn('No ccache found. Please be aware', stacklevel=1)\n"
        "warnings.warn('something new', stacklevel=1)\n"
        "print(os.environ.get('OMP_NUM_THREADS'))\n"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS",)}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environ, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


def test_prepare_sets_threads_with_one_line_and_silences_only_what_is_known():
    threads, stderr = run_prepare(PADDLE_LOCAL_SIZE="1000")
    assert threads == "1"
    assert stderr.count("OMP_NUM_THREADS=1") == 1
    assert "ccache" not in stderr and "something new" in stderr


def test_prepare_can_be_turned_off_and_is_quiet_on_other_ranks():
    threads, stderr = run_prepare(PPLDM_NO_CPU_TUNING="1")
    assert threads == "None" and "OMP_NUM_THREADS" not in stderr
    threads, stderr = run_prepare(PADDLE_TRAINER_ID="1", PADDLE_TRAINERS_NUM="2", PADDLE_LOCAL_SIZE="1000")
    assert threads == "1" and "OMP_NUM_THREADS" not in stderr


def test_import_of_paddle_passes_on_all_but_the_harmless_lines(tmp_path):
    lines = ["WARNING: OMP_NUM_THREADS set to 2, not 1.", "PLEASE USE OMP_NUM_THREADS WISELY.", "something new"]
    (tmp_path / "paddle.py").write_text(
        f"import sys\nsys.stderr.write({chr(10).join(lines)!r})\nraise ImportError('why')\n"
    )
    program = "from ppldm.utils.machine.cpu import load_paddle\nload_paddle()\n"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert "OMP_NUM_THREADS" not in done.stderr
    assert "something new" in done.stderr and "ImportError: why" in done.stderr


@pytest.mark.parametrize("before, threads", [("", "1"), ("os.environ['OMP_NUM_THREADS'] = '3'", "3")])
def test_a_script_has_the_threads_of_the_commands_and_no_chatter(before, threads):
    program = f"import os; {before}\nfrom ppldm import load\nprint(os.environ['OMP_NUM_THREADS'])\n"
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ["PADDLE_LOCAL_SIZE"] = "1000"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [threads] and "Warning" not in done.stderr


def test_paddles_chatter_is_silenced_and_nothing_else():
    program = (
        "import sys\n"
        "from ppldm.utils.machine.cpu import quiet_paddle\n"
        "with quiet_paddle():\n"
        "    from paddle.distributed.parallel import _print_modified_flags\n"
        "    _print_modified_flags(['FLAGS(name=1)'])\n"
        "    sys.stderr.write('something new\\n')\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PPLDM_DEBUG": debug},
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for debug in ("0", "1")
    ]
    assert said[0] == "something new\n"
    assert "Modified FLAGS" in said[1] and "FLAGS(name=1)" in said[1]


@pytest.mark.parametrize("variables, kept", [({}, True), ({"PPLDM_NO_CPU_TUNING": "1"}, False)])
def test_freed_memory_is_kept_unless_it_is_turned_off(variables, kept):
    """A process that frees 200 MB still has them, or has given them back."""
    program = (
        "import os\n"
        "from ppldm.utils.machine.cpu import prepare_cpu\n"
        "prepare_cpu()\n"
        "pages = lambda: int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "import numpy as np\n"
        "before, array = pages(), np.ones(25_000_000)\n"
        "del array\n"
        "print(pages() - before > 150_000_000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(kept), done.stderr


def test_a_small_machine_gets_its_memory_back(monkeypatch):
    monkeypatch.setattr(cpu, "usable_memory_bytes", lambda: cpu.LEAST_MEMORY_BYTES - 1)
    assert not cpu.keep_freed_memory()


def test_a_signal_waits_until_paddle_is_imported():
    program = (
        "import os, signal\n"
        "from ppldm.utils.machine.cpu import importing_paddle\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('stopped'))\n"
        "with importing_paddle():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["imported", "stopped"]


@pytest.mark.parametrize("library", ["paddle", "paddlenlp.transformers"])
def test_what_an_import_makes_is_not_looked_through_for_garbage(library):
    program = (
        "import gc\n"
        "from ppldm.utils.machine.cpu import load_paddle\n"
        "load_paddle()\n"
        f"import {library}\n"
        "print(len(gc.get_objects()) < gc.get_freeze_count() / 10)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_only_the_first_import_keeps_what_is_there_for_good():
    program = (
        "import gc\n"
        "from ppldm.utils.machine.cpu import load_paddle\n"
        "load_paddle()\n"
        "before = gc.get_freeze_count()\n"
        "load_paddle(1)\n"
        "print(gc.get_freeze_count() <= before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
