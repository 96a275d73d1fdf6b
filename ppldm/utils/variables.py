"""Environment variables: no other module looks at `os.environ`. Users, schedulers and launchers speak by them, and some
libraries are configured so before they are imported. No parameter of a command travels through them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def read(name: str, default: str = "") -> str:
    """The value of a variable; the default where it is not set."""
    return os.environ.get(name, default)


def is_on(name: str) -> bool:
    """True where a variable is set to something else than 0."""
    return read(name, "0") not in ("", "0")


def all_variables() -> Mapping[str, str]:
    return os.environ


def set_for_libraries(variables: Mapping[str, str], replace: bool = False) -> None:
    """Set what libraries will look for. What the user has set stays, unless `replace`."""
    os.environ.update({name: value for name, value in variables.items() if replace or name not in os.environ})


@contextmanager
def taken_back():
    """Around what sets variables for libraries of this process: programs that it starts later choose for themselves."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before:
            del os.environ[name]


_refusals: list[bool] = []  # one for each `--offline` that is in force


def is_offline(flag: bool = False) -> bool:
    """True where the flag, PPLDM_OFFLINE or HF_HUB_OFFLINE forbids to ask for models by name or address."""
    return flag or is_network_forbidden() or is_on("HF_HUB_OFFLINE")


def is_network_forbidden() -> bool:
    """True where `--offline` or PPLDM_OFFLINE forbids all of the network; HF_HUB_OFFLINE is not for stores of data."""
    return bool(_refusals) or is_on("PPLDM_OFFLINE")


@contextmanager
def network_forbidden(flag: bool = True) -> Iterator[None]:
    """With the flag, nothing that runs in the block may use the network, in whichever thread."""
    if not flag:
        yield
        return
    _refusals.append(True)
    try:
        yield
    finally:
        _refusals.pop()
