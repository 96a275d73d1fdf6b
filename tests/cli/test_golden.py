"""Help texts, exit statuses and error lines stay as they are, or the change is seen: tests/golden, and who makes it."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from ppldm.cli.main import COMMANDS

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "helpers/golden.py"
REFRESH = "python tests/helpers/golden.py"


def differences(kept: Path, made: Path, what: str = "") -> list[str]:
    """The lines in which the files of two folders whose paths begin with `what` differ, as `diff -u` shows them; a file
    may be in one only."""
    names = {path.relative_to(top).as_posix() for top in (kept, made) for path in top.rglob("*.txt")}
    found = []
    for name in sorted(name for name in names if name.startswith(what)):
        old, new = (
            path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for path in (kept / name, made / name)
        )
        found += difflib.unified_diff(old, new, f"{name} (kept)", f"{name} (now)", lineterm="")
    return found


# The terminal's width is not seen. It is set here, since a command that starts with another one starts cold.
NARROW = f"import os, runpy; os.environ['COLUMNS'] = '61'; runpy.run_path({str(GOLDEN)!r}, run_name='__main__')"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """What all commands say now."""
    folder = tmp_path_factory.mktemp("golden")
    done = subprocess.run([sys.executable, "-c", NARROW, folder], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("what", ["help", "errors"])
def test_help_and_errors_are_as_kept(made, what):
    if found := differences(TESTS / "golden", made, what):
        pytest.fail("\n".join([*found, f"where that is wanted: {REFRESH}"]), pytrace=False)


def test_each_command_has_an_error_and_each_error_is_one_line():
    blocks = (TESTS / "golden/errors.txt").read_text(encoding="utf-8").split("\n$ ")[1:]
    for name in COMMANDS:
        assert any(block.startswith(f"ppldm {name} ") or block.startswith(f"ppldm {name}\n") for block in blocks), name
    for block in blocks:
        command, *said = [line for line in block.split("\n\n")[0].splitlines() if not line.startswith("#")]
        assert said[0][:3] in ("1: ", "2: "), command
        errors = [line for line in said if line.removeprefix("1: ").removeprefix("2: ").startswith("error: ")]
        assert errors == said[-1:] and "Traceback" not in block, command


@pytest.mark.parametrize("change, shown", [("a\nb\n", []), ("a\nc\n", ["-b", "+c"]), (None, ["-a", "-b"])])
def test_a_changed_or_missing_text_is_shown(tmp_path, change, shown):
    for name, text in (("kept", "a\nb\n"), ("made", change)):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "one.txt").write_text(text)
    found = differences(tmp_path / "kept", tmp_path / "made")
    assert [line for line in found if line[0] in "+-" and line[:3] not in ("+++", "---")] == shown
