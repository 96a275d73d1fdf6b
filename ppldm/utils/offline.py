"""Whether the network may be used."""

from .variables import is_on


def is_offline(flag: bool = False) -> bool:
    """True where the flag, PPLDM_OFFLINE or HF_HUB_OFFLINE forbids the network."""
    return flag or is_on("PPLDM_OFFLINE") or is_on("HF_HUB_OFFLINE")
