"""The named faults of tests/mutants still fit the code: their text stands once, what takes its place is Python, and
their tests exist."""

import ast
import importlib.util
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
    return (ROOT / path).is_file() and f"def {name.partition('[')[0]}(" in (ROOT / path).read_text("utf-8")


def compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_every_fault_fits_the_code():
    faults = load_runner().read_faults()
    assert faults
    wrong = []
    for fault in faults:
        name = f"{fault['area']}/{fault['name']}"
        text = (ROOT / fault["file"]).read_text("utf-8")
        if text.count(fault["old"]) != 1:
            wrong.append(f"{name}: its old text does not stand once in {fault['file']}")
        if fault["file"].endswith(".py") and not compiles(text.replace(fault["old"], fault["new"])):
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
