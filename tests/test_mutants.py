"""The named faults of tests/mutants still fit the code: their text stands once, what takes its place is Python, and
their tests exist."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load_runner():
    specification = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests/mutants/run.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def is_there(test: str) -> bool:
    """Whether there is such a file or folder, and in it such a function."""
    path, _, name = test.partition("::")
    if not name:
        return (ROOT / path).exists()
    return (ROOT / path).is_file() and f"def {name.partition('[')[0]}(" in read(path)


@cache
def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


@cache
def statements(path: str) -> list[tuple[int, int]]:
    """The first line, with decorators, and the last one of each statement at the top of a file, from 0 on."""
    found = ast.parse(read(path)).body
    first = [min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) for node in found]
    return [(line - 1, node.end_lineno - 1) for line, node in zip(first, found, strict=True)]


def compiles(path: str, old: str, new: str) -> bool:
    """Whether a file is Python with `new` for `old`: only the statements that this touches are read again."""
    text = read(path)
    at = text.index(old)
    begin, end = text.count("\n", 0, at), text.count("\n", 0, at + len(old))
    touched = [one for one in statements(path) if one[0] <= end and begin <= one[1]] or [(begin, end)]
    begin, end = min(begin, touched[0][0]), max(end, touched[-1][1])
    lines = text.splitlines(keepends=True)
    try:
        ast.parse("".join(lines[begin : end + 1]).replace(old, new))
    except SyntaxError:
        return False
    return True


def test_every_fault_fits_the_code():
    faults = load_runner().read_faults()
    assert faults
    wrong = []
    for fault in faults:
        name = f"{fault['area']}/{fault['name']}"
        if read(fault["file"]).count(fault["old"]) != 1:
            wrong.append(f"{name}: its old text does not stand once in {fault['file']}")
        elif fault["file"].endswith(".py") and not compiles(fault["file"], fault["old"], fault["new"]):
            wrong.append(f"{name}: leaves {fault['file']} without a meaning, which any test would catch")
        if fault["old"] == fault["new"]:
            wrong.append(f"{name}: changes nothing")
        wrong += [
            f"{name}: no {word}" for word in fault["tests"].split() if word.startswith("tests/") and not is_there(word)
        ]
    assert not wrong, "\n".join(wrong)


def test_names_are_unique():
    names = [(fault["area"], fault["name"]) for fault in load_runner().read_faults()]
    assert len(names) == len(set(names))
