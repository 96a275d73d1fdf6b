"""What ppdiffusers 0.29 and paddlenlp 3.0.0b4 import of huggingface_hub and aistudio-sdk, and newer ones do not have.

Tried with huggingface_hub 0.25.2 (which has all of it), 0.36.2, 1.33.0 and 2.4.0, and with aistudio-sdk 0.2.6 and 0.3.9
(tests/utils/machine/test_hub_names.py). A name that is there stays as it is."""

import importlib
import importlib.metadata
import sys

from ..errors import EnvironmentProblem

# Distribution, module and the names that may be missing in it.
_NAMES = (
    ("huggingface_hub", "huggingface_hub", ("HfFolder", "cached_download", "repo_type_and_id_from_hf_id")),
    ("huggingface_hub", "huggingface_hub.constants", ("hf_cache_home",)),
    ("huggingface_hub", "huggingface_hub.file_download", ("_request_wrapper",)),
    ("aistudio-sdk", "aistudio_sdk.hub", ("download",)),
)


def provide() -> None:
    """Put the missing names in their places, before ppdiffusers or paddlenlp is imported."""
    from huggingface_hub import constants, get_token

    own = {"HfFolder": type("HfFolder", (), {"get_token": staticmethod(get_token)}), "hf_cache_home": constants.HF_HOME}
    for package, place, names in _NAMES:
        module = importlib.import_module(place)
        for name in names:
            if not hasattr(module, name):
                setattr(module, name, own.get(name) or _refuse(package, f"{place}.{name}"))


def _refuse(package: str, name: str):
    """In place of a function that ppldm itself never calls: ppdiffusers' own downloads and uploads do."""

    def refuse(*_, **__):
        version = importlib.metadata.version(package)
        raise EnvironmentProblem(f"{package} {version} has no {name}; install the version in requirements/lock.txt")

    return refuse


def network_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises where it cannot reach a hub: before 1.0 errors of requests, then of httpx, then of
    httpx2, which nobody imports here before it does."""
    bases = {"requests": "RequestException", "httpx": "HTTPError", "httpx2": "HTTPError"}
    return tuple(getattr(sys.modules[module], name) for module, name in bases.items() if module in sys.modules)
