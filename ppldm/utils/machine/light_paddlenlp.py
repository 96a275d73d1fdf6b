"""PaddleNLP without its servers, metrics and data sets, until somebody asks for them.

`import paddlenlp` of 3.0.0b4 imports all of its folders, and with them FastAPI, scikit-learn and `datasets`: 1.4 s of
CPU time in every process. Here its models and tokenizers are imported first and by themselves (0.5 s). Whoever asks for
anything else, such as its Trainer, runs the `__init__` of the package, since the rest imports only in the order of it.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys

VERSION = "3.0.0b4"  # whose folders these are; another version is imported as it is
_LIGHT = {"data", "generation", "layers", "ops", "quantization", "transformers", "utils", "version"}


class _Initializer(importlib.abc.Loader):
    """Makes the package, and runs its own `__init__` when `run` is called, once."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self.own, self.module = own, None

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        import paddle

        self.module, module.__version__, module.__getattr__ = module, VERSION, self._find
        importlib.import_module(f"{module.__name__}.data")  # and with it transformers: they import one another
        paddle.disable_signal_handler()  # as the package's own __init__ ends

    def _find(self, name: str):
        """An attribute that the package has not got yet."""
        if name.startswith("__") or not self.run():
            raise AttributeError(f"module {self.module.__name__!r} has no attribute {name!r}")
        return getattr(self.module, name)

    def run(self) -> bool:
        """Whether it was this call that ran it."""
        if "__getattr__" not in vars(self.module):
            return False
        del self.module.__getattr__
        self.own.exec_module(self.module)
        return True


class _Imported(importlib.abc.Loader):
    """Gives the module that another import has made."""

    def __init__(self, module) -> None:
        self.module = module

    def create_module(self, spec):
        return self.module

    def exec_module(self, module) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        package, _, rest = name.partition(".")
        if package != "paddlenlp":
            return None
        if not rest:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec and importlib.metadata.version(name) == VERSION:
                spec.loader = _Initializer(spec.loader)
            return spec
        loader = sys.modules[package].__spec__.loader
        if rest.partition(".")[0] in _LIGHT or not isinstance(loader, _Initializer) or not loader.run():
            return None
        if (module := sys.modules.get(name)) is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, _Imported(module), origin=module.__spec__.origin)
        spec.submodule_search_locations = module.__spec__.submodule_search_locations
        module.__spec__ = spec  # which is what Python takes of a module that came while it was looked for
        return spec


def wait_with_paddlenlp() -> None:
    """From now on in this process, unless PaddleNLP is there already."""
    if "paddlenlp" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
