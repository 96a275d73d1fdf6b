"""No file of the package has over 500 lines and no function over 60, so that each can be read in one go."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ppldm"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
FILES = sorted(PACKAGE.rglob("*.py"))


def over_long(source: str) -> list[str]:
    """The functions of a source that have too many lines, and "" for the file itself."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    long = [node.name for node in functions if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES]
    return [""] * (len(source.splitlines()) > MAX_FILE_LINES) + long


def test_files_and_functions_are_short():
    found = {path.relative_to(PACKAGE).as_posix(): over_long(path.read_text(encoding="utf-8")) for path in FILES}
    assert not {name: functions for name, functions in found.items() if functions}


@pytest.mark.parametrize(
    "lines, inner, found",
    [(500, 60, []), (501, 60, [""]), (500, 61, ["f"]), (501, 61, ["", "f"])],
)
def test_what_is_too_long_is_found(lines, inner, found):
    source = "def f():\n" + "    pass\n" * (inner - 1)
    assert over_long(source + "pass\n" * (lines - inner)) == found
