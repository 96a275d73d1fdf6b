"""The quick tests, `pytest -m quick`: the folders and files below, but for their slow tests; no other file is imported.

Together they take under two minutes on two cores: settings and recipes, every command's help and flags, the order of
rows and their selection, captions and crops, formulas of schedules and metrics, and the rules of the code. They train
nothing and start next to no processes: what a change of training or of a network breaks, they miss.
"""

from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
QUICK = (
    *("cli", "config", "data/order", "data/select", "data/text", "data/images", "evaluation/metrics", "demo"),
    *("diffusion/test_process.py", "diffusion/test_cascade_formulas.py"),
    *("test_import_rules.py", "test_mutants.py", "test_size.py"),
)


@cache
def is_quick(path: Path) -> bool:
    """Whether a file, or what is in a folder, is part of them."""
    return any(path.is_relative_to(TESTS / one) for one in QUICK)


def pytest_ignore_collect(collection_path, config):
    """With `-m quick`, files with none of them are not imported."""
    is_other = collection_path.suffix == ".py" and not is_quick(collection_path)
    return True if is_other and config.option.markexpr == "quick" and collection_path.name != "conftest.py" else None


def pytest_itemcollected(item):
    """Give the tests their marker, before -m looks for it."""
    if is_quick(item.path) and not item.get_closest_marker("slow"):
        item.add_marker("quick")
