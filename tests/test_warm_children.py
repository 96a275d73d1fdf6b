"""A child that is started warm is a child as any other; only its imports are there before it."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_programs
import warm_start

IS_WARM = "import sys; warm = 'ppldm.training.train' in sys.modules; "


def run(code: str, *words, **settings) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", IS_WARM + code, *words], capture_output=True, text=True, **settings)


def test_it_has_what_a_new_process_has(tmp_path):
    code = """
import os, signal
print(warm, 'paddle' in sys.modules, sys.argv, os.getcwd() == sys.argv[2], os.environ['OWN'], os.getppid(),
      sys.path[0] == '', __name__, signal.getsignal(signal.SIGINT) is signal.default_int_handler,
      signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, sys.excepthook is sys.__excepthook__,
      open('/proc/self/cmdline').read().split(chr(0))[3:5], 'OWN=1' in open('/proc/self/environ').read(),
      os.getpgid(0) == os.getpid(), sys.stdin.read(), os.listdir('/proc/self/task') == [str(os.getpid())])
"""
    done = run(code, "a b", str(tmp_path), cwd=tmp_path, env=os.environ | {"OWN": "1"}, input="in",
               start_new_session=True)  # fmt: skip
    expected = [True, False, ["-c", "a b", str(tmp_path)], True, "1", os.getpid(), True, "__main__", True, True, True,
                ["a b", str(tmp_path)], True, True, "in", True]  # fmt: skip
    assert (done.stdout, done.stderr) == (" ".join(map(str, expected)) + "\n", "")


@pytest.mark.parametrize(
    "code, status, says",
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('bad')", 1, "bad\n"),
        ("raise ValueError(warm)", 1, 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
                                      "ValueError: True\n"),
        ("import atexit; atexit.register(lambda: sys.stderr.write(f'last {warm}'))", 0, "last True"),
        ("sys.stdout.close()", 0, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)  # fmt: skip
def test_it_ends_as_any_other(code, status, says):
    done = run(code)
    assert (done.returncode, done.stderr) == (status, says)


def test_no_child_is_deaf_because_of_when_the_first_was_started(monkeypatch):
    monkeypatch.setattr(warm_start, "_server", None)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        own = warm_start.server()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    done = run("import signal; print(warm, signal.pthread_sigmask(signal.SIG_BLOCK, ()))")
    own.close()
    assert (done.stdout, done.stderr) == ("True set()\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it_and_its_group(number):
    words = [sys.executable, "-u", "-c", IS_WARM + "import time; print(warm, end=''); time.sleep(100)"]
    with subprocess.Popen(words, stdout=-1, stderr=-1, start_new_session=True) as process:
        assert process.stdout.read(4) == b"True" and os.getpgid(process.pid) == process.pid
        os.killpg(process.pid, number)
        assert process.wait() == -number
        assert (b"KeyboardInterrupt" in process.stderr.read()) == (number == signal.SIGINT)


def test_what_a_server_cannot_imitate_starts_cold(tmp_path):
    (tmp_path / "module.py").touch()
    variables = {"OMP_NUM_THREADS": "2", "HOME": tmp_path, "FLAGS_any": "1", "PYTHONPATH": tmp_path, "PYTHONANY": "1"}
    for name, value in variables.items():
        assert run("print(warm)", env=os.environ | {name: str(value)}).stdout == "False\n", name
    assert run("print(warm)", env=os.environ | {"PYTHON": "any"}).stdout == "True\n"  # which only scripts read
    done = subprocess.run([sys.executable, "-S", "-c", IS_WARM + "print(warm)"], capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_it_finds_what_is_installed_whatever_pythonpath_says(tmp_path):
    code = "import yaml; print(warm, sys.path)"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    warm, cold = (run(code, env=os.environ | {"PYTHONPATH": path, **more}).stdout.partition(" ")
                  for more in ({}, {"FLAGS_any": "1"}))  # fmt: skip
    assert (warm[0], cold[0]) == ("True", "False") and warm[2] == cold[2]


def test_a_program_that_another_takes_the_place_of_is_warm(tmp_path):
    """The same process, without what the first one had open."""
    second = "import os; open(sys.argv[1], 'w').write(f'{warm} {os.getpid()} {os.path.exists(\"/proc/self/fd/90\")}')"
    (tmp_path / "first.py").write_text(
        "import atexit, os, sys\natexit.register(print, 'first')\nos.dup2(0, 90, False)\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {IS_WARM + second!r}, sys.argv[1]])"
    )
    with warm_start.warm_children(nested=True), subprocess.Popen(
        [sys.executable, tmp_path / "first.py", tmp_path / "said"], stdout=-1
    ) as process:  # fmt: skip
        assert process.stdout.read() == b"" and process.wait() == 0
    assert (tmp_path / "said").read_text() == f"True {process.pid} False"


@pytest.mark.parametrize("number", [3, 102, 103, 104, 105, 250, 398, 400])
def test_files_keep_their_numbers(tmp_path, number):
    """Also where the child's own copies of others would lie."""
    (tmp_path / "text").write_text("here")
    with open(tmp_path / "text") as file:  # the first numbers from there on that nothing has
        numbers = [fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, number) for _ in range(3)]
    try:
        code = "import os; print([os.pread(int(one), 9, 0) for one in sys.argv[1:]])"
        done = run(code, *map(str, numbers), pass_fds=numbers)
        assert (done.stdout, done.stderr) == (f"{[b'here'] * 3}\n", "")
    finally:
        for one in numbers:
            os.close(one)


def test_two_children_draw_other_numbers():
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    one, other = (run(code).stdout.split() for _ in range(2))
    assert one[0] != other[0] and one[1] != other[1]


def test_children_of_a_launcher_are_warm(tmp_path):
    (tmp_path / "rank.py").write_text(
        IS_WARM + f"import os; from pathlib import Path; Path({str(tmp_path)!r}, os.environ['PADDLE_TRAINER_ID'])"
        ".write_text(f'{warm} {os.getsid(0) == os.getpid()}')"
    )
    words = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", tmp_path, tmp_path / "rank.py"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True True"] * 2


def test_without_the_server_children_start_cold(monkeypatch, tmp_path):
    monkeypatch.setattr(warm_start, "_server", None)
    with warm_start.server().process as process:
        process.kill()
    with pytest.warns(UserWarning, match="server of warm children is gone"):
        assert run("print(warm)").stdout == "False\n"
    assert run("print(warm)").stdout == "False\n"  # and says so once
    monkeypatch.setattr(warm_start, "_server", None)
    (tmp_path / "ppldm").mkdir()
    (tmp_path / "ppldm" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.warns(UserWarning, match="(?s)did not start.*ModuleNotFoundError"):
        assert run("print(warm)").stdout == "False\n"


@pytest.mark.parametrize(
    "script, status, said",
    [
        (
            f'python -c "{IS_WARM}print(warm, os.environ[\'OWN\'], os.getcwd() == sys.argv[1])" "$PWD"',
            0,
            "True 1 True\n",
        ),
        ("python -c 'import sys; sys.exit(sys.stdin.read())' <<< 'bad'", 1, ""),
        ("python -c 'import os; os.kill(os.getpid(), 9)' || echo $?", 0, "137\n"),
        (f'python -S -c "{IS_WARM}print(warm)"', 0, "False\n"),
        ("ppldm --version | cut -d' ' -f1", 0, "ppldm\n"),
    ],
)
def test_a_shell_starts_them_warm(programs, tmp_path, script, status, said):
    script = script.replace("import sys; warm", "import os, sys; warm")
    environ = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "OWN": "1"}
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, said), done.stderr


def wait_until(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_to_a_program_of_a_shell_reaches_its_child(programs, number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([programs / "python", "-c", code], stdout=-1, stderr=-1) as process:
        child = int(process.stdout.readline())
        assert child != process.pid
        process.send_signal(number)
        assert process.wait() == -number
        # The end of its streams is that of the child.
        assert process.stdout.read() == b"" and b"KeyboardInterrupt" in process.stderr.read() or number != signal.SIGINT
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_a_program_of_a_shell_that_is_killed_before_its_child_is_told_takes_it_along(tmp_path, monkeypatch):
    started, start = [], warm_programs._start
    monkeypatch.setattr(warm_programs, "_start", lambda *given: started.append(start(*given)) or started[0])
    ours, theirs = socket.socketpair()
    with open(os.devnull, "r+") as nothing:
        asked = [["-c", "import time; time.sleep(100)"], str(tmp_path), dict(os.environ)]
        warm_start.send(ours, asked, [nothing.fileno()] * 3)
    ours.close()
    warm_programs._answer(theirs)
    assert started[0] and not Path(f"/proc/{started[0]}").exists()
