"""Whether the network may be used."""

import os


def is_offline(flag: bool = False) -> bool:
    """True where the flag, PPLDM_OFFLINE or HF_HUB_OFFLINE forbids the network."""
    return flag or any(os.environ.get(name, "0") not in ("", "0") for name in ("PPLDM_OFFLINE", "HF_HUB_OFFLINE"))
