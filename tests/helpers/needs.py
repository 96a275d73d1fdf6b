"""What some tests need beyond the lock. Without it a test is skipped, or fails where PPLDM_REQUIRE names it.

    @pytest.mark.needs("browser")            on a test
    needs.need("parity")                     above a module's `import torch`

PPLDM_REQUIRE is a list such as `parity,browser`, or `all` (but for BY_NAME): what an environment is to prove.
Continuous integration sets it (run_scripts/proof.sh), so that nothing is skipped there unseen.
"""

import importlib
import os
import shutil

import pytest

from ppldm.utils.machine.resources import read_java_version


def _modules(*names):
    def missing():
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                return f"{name} cannot be imported ({error})"
        return None

    return missing


def _programs(*names):
    return lambda: next((f"no program {name} on PATH" for name in names if not shutil.which(name)), None)


# What there is to need: a function that says what is missing, None where nothing is.
NEEDS = {
    "parity": _modules("torch", "diffusers", "transformers", "cleanfid"),
    "engine": _modules("openvino"),
    "wandb": _modules("wandb"),
    "resizer": _modules("albumentations", "wandb", "img2dataset.resizer"),
    "ray": _modules("ray"),
    "streaming": _modules("streaming"),
    "comet": _modules("comet_ml"),
    "s3": _modules("s3fs", "moto.server"),
    "browser": _programs("chromium", "chromedriver"),
    "java": lambda: None if read_java_version() else "no Java on PATH",
    **{name: _programs(name) for name in ("gzip", "pigz", "bgzip", "openssl", "g++", "zsh", "fish")},
}


# What the end of a run calls them: a name that a reader knows.
CALLED = {"parity": "PyTorch", "engine": "OpenVINO", "resizer": "albumentations", "comet": "Comet", "s3": "moto"}
BY_NAME = {"ray", "streaming"}  # hundreds of megabytes, and gigabytes with PyTorch's CUDA: no part of `all`


def required() -> set[str]:
    """The names in PPLDM_REQUIRE. Raises pytest.UsageError for one that is not known."""
    names = {name.strip() for name in os.environ.get("PPLDM_REQUIRE", "").split(",") if name.strip()}
    unknown = names - NEEDS.keys() - {"all"}
    if unknown:
        raise pytest.UsageError(f"PPLDM_REQUIRE names {', '.join(sorted(unknown))}; known: all, {', '.join(NEEDS)}")
    return names | (NEEDS.keys() - BY_NAME) if "all" in names else names


def need(name: str) -> None:
    """Skip the test or module that calls this where `name` is missing; fail it where PPLDM_REQUIRE names it."""
    if name == "parity":
        os.environ.pop("USE_TORCH", None)  # conftest.own_environment has set it
    missing = NEEDS[name]()
    if missing and name in required():
        pytest.fail(f"PPLDM_REQUIRE asks for {name}, and {missing}", pytrace=False)
    if missing:
        pytest.skip(f"needs {CALLED.get(name, name)}: {missing}", allow_module_level=True)
