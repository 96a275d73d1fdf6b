"""Whether the network may be used."""

from collections.abc import Iterator
from contextlib import contextmanager

from .variables import is_on

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
