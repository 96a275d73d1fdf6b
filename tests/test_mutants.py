"""The named faults of tests/mutants still fit the code: their text stands once, their tests exist."""

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


def test_every_fault_fits_the_code():
    faults = load_runner().read_faults()
    assert faults
    wrong = []
    for fault in faults:
        name = f"{fault['area']}/{fault['name']}"
        if (ROOT / fault["file"]).read_text("utf-8").count(fault["old"]) != 1:
            wrong.append(f"{name}: its old text does not stand once in {fault['file']}")
        if fault["old"] == fault["new"]:
            wrong.append(f"{name}: changes nothing")
        wrong += [
            f"{name}: no {word}" for word in fault["tests"].split() if word.startswith("tests/") and not is_there(word)
        ]
    assert not wrong, "\n".join(wrong)


def test_names_are_unique():
    names = [(fault["area"], fault["name"]) for fault in load_runner().read_faults()]
    assert len(names) == len(set(names))
