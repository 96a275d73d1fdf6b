"""Help texts, exit statuses and error lines stay as they are, or the change is seen: tests/golden, and who makes it."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from ppldm.cli.main import COMMANDS

TESTS = Path(__file__).resolve().parents[1]
REFRESH = "python tests/helpers/golden.py"


def differences(kept: Path, made: Path) -> list[str]:
    """The lines in which the files of two folders differ, as `diff -u` shows them; a file may be in one only."""
    names = sorted({path.relative_to(top).as_posix() for top in (kept, made) for path in top.rglob("*.txt")})
    found = []
    for name in names:
        old, new = (
            path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for path in (kept / name, made / name)
        )
        found += difflib.unified_diff(old, new, f"{name} (kept)", f"{name} (now)", lineterm="")
    return found


def test_help_and_errors_are_as_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "61")  # the terminal's width is not seen
    done = subprocess.run(
        [sys.executable, TESTS / "helpers/golden.py", tmp_path], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = differences(TESTS / "golden", tmp_path)
    if found:
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
