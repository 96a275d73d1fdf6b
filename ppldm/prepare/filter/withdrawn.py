"""Metadata that LAION has withdrawn, known by its path or by its columns.

In December 2023 LAION-5B and all made from it were taken back, as thousands of their links led to illegal pictures;
Re-LAION-5B (August 2024) is the successor without those.
"""

import re
from collections.abc import Iterable

_NAMES = re.compile(r"laion[-_ ]?(art|400m|5b|2b|1b|high|aesthetic)|improved_aesthetics|2B-en-4\.5_", re.IGNORECASE)
_SUCCESSOR = re.compile(r"re[-_]?laion", re.IGNORECASE)
_COLUMNS = {"URL", "TEXT", "WIDTH", "HEIGHT", "similarity", "hash", "punsafe", "pwatermark"}
REMEDY = (
    "LAION withdrew it in December 2023, as it has links to illegal pictures: take its successor Re-LAION-5B "
    "(`ppldm dataset show relaion-5b-research-safe`), or remove the rows that are not in it"
)


def find_withdrawn(paths: Iterable, columns: Iterable[str]) -> str | None:
    """Why tables seem to be of a withdrawn release, and what to do; None where nothing says so."""
    names = [str(path) for path in paths]
    if any(map(_SUCCESSOR.search, names)):
        return None
    named = next(filter(_NAMES.search, names), None)
    if named is None and not set(columns) >= _COLUMNS:
        return None
    return f"{named or names[0]} looks like metadata of LAION-5B: {REMEDY}"
