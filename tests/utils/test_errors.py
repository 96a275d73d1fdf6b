"""What a user sees of an error, and with which exit status."""

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ppldm.utils.errors import ConfigError, Interrupted, PpldmError, Preempted, RowError, exit_on_error


@pytest.mark.parametrize(
    "error, status, line",
    [
        (ConfigError("--x 1 is odd"), 2, "error: --x 1 is odd"),
        (Interrupted("stopped"), 130, "stopped"),
        (Preempted("stopped"), 75, "stopped"),
        (MemoryError(), 1, "error: out of memory; use smaller batches or pictures, or a machine with more"),
        (MemoryError("no 3 GiB\nat"), 1,
         "error: out of memory (no 3 GiB at); use smaller batches or pictures, or a machine with more"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/metrics.jsonl"), 1,
         "error: the disk is full for out/metrics.jsonl (No space left on device); free some and give the same command "
         "again"),
        (OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "longer/than/255"), 2,
         "error: too long for the name of a file: longer/than/255"),
    ],
)  # fmt: skip
def test_one_line_and_a_status(capsys, error, status, line):
    with pytest.raises(SystemExit) as exit, exit_on_error():
        raise error
    assert exit.value.code == status
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize("free, named", [(0, True), (1 << 30, False)])
def test_full_shared_memory_is_named(capsys, monkeypatch, free, named):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(SystemExit), exit_on_error():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    line = capsys.readouterr().err
    assert ("/dev/shm" in line and "--shm-size" in line) == named and ("the disk is full" in line) != named


def test_other_errors_of_the_system_keep_their_traceback():
    with pytest.raises(PermissionError), exit_on_error():
        raise PermissionError(errno.EACCES, "no")


def test_an_error_is_one_line_whatever_it_quotes():
    assert str(PpldmError("a\nb\r\n\x1b[31m c\x00\x85d 图")) == "a b \\u001b[31m c\\u0000 d 图"
    assert str(RowError("reason", "a\n\nb")) == "a b"
    long = str(PpldmError(f"{'x' * 10**6} is wrong; mend it"))
    assert len(long) == 2000 and long.endswith(" is wrong; mend it")


@pytest.mark.parametrize("debug", ["0", "1"])
def test_nothing_that_is_shown_moves_the_cursor(capsys, monkeypatch, debug):
    monkeypatch.setenv("PPLDM_DEBUG", debug)
    with pytest.raises(SystemExit), exit_on_error():
        print("a caption \x1b]0;title\x07", "图\t🟥\n", sep="\n")
        raise ConfigError("no \x1b[2J") from ValueError("\x9b2J")
    shown = capsys.readouterr()
    assert shown.out == "a caption \\u001b]0;title\\u0007\n图\t🟥\n\n"
    assert "\x1b" not in shown.err and "\x9b" not in shown.err
    assert shown.err.endswith("error: no \\u001b[2J\n") and ("Traceback" in shown.err) == (debug == "1")
    print("\x1b")
    assert capsys.readouterr().out == "\x1b\n"  # outside of the block stdout is as it was


@pytest.mark.parametrize("lines", [1, 100_000])
def test_whoever_reads_no_further_ends_the_command_without_a_word(lines):
    """As `ppldm head LIST | head -1` does, whether the rest is written at once or when it ends."""
    program = f"""
from ppldm.utils.errors import exit_on_error
with exit_on_error():
    print("first", flush=True)
    input()  # until nobody reads
    for number in range({lines}):
        print("a line", number)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stderr.read() == b"" and process.wait() == 141


def test_a_pipe_that_breaks_elsewhere_is_an_error():
    with pytest.raises(BrokenPipeError), exit_on_error():
        raise BrokenPipeError(errno.EPIPE, "of a child")


def test_a_command_without_an_output_ends_well():
    program = "from ppldm.utils.errors import exit_on_error\nwith exit_on_error(): pass"
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" >&-', sys.executable, program], capture_output=True)
    assert done.returncode == 0 and done.stderr == b""


@pytest.mark.cold
def test_what_other_packages_note_is_left_out_and_what_they_warn_of_in_their_log_is_said_once():
    program = """
import logging, warnings
from ppldm.utils.errors import quiet_others
quiet_others()
logging.basicConfig(level=logging.INFO)
logging.getLogger("foreign.part").info("a note")
logging.getLogger("foreign.part").warning("trouble")
logging.getLogger("talking").addHandler(logging.StreamHandler())
logging.getLogger("talking.part").error("bad")
for module in ("foreign.part", "ppldm.part"):
    warnings.warn_explicit(f"warning of {module}", UserWarning, "file.py", 1, module)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = "file.py:1: UserWarning: warning of ppldm.part"
    assert done.stderr.split("\n") == ["WARNING:foreign.part:trouble", "bad", ours, ""]
