"""torch-fidelity's modules, of which its `__init__` would import some that ask for torchvision."""

import importlib
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType


@contextmanager
def torch_fidelity():
    """A function that imports `torch_fidelity.NAME`, for modules that need no torchvision."""
    package = ModuleType("torch_fidelity")
    package.__path__ = find_spec("torch_fidelity").submodule_search_locations
    sys.modules["torch_fidelity"] = package
    try:
        yield lambda name: importlib.import_module(f"torch_fidelity.{name}")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch_fidelity"]:
            del sys.modules[name]
