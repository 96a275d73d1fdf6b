"""What `ppldm doctor` says: one line for each thing it looked at, with the flag to change where it is not sound."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...utils.errors import PpldmError
from ...utils.log import get_logger

STATUSES = ("ok", "warning", "error")  # the worst last


@dataclass(frozen=True)
class Finding:
    """`name`: what was looked at. `fix`: what to change; empty where all is well."""

    name: str
    status: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.status:<8}{self.name:<16}{self.text}" + (f"; {self.fix}" if self.fix else "")


def good(name: str, text: str) -> Finding:
    """That all is well."""
    return Finding(name, "ok", text)


def judged(name: str, text: str, warning: str = "", error: str = "") -> Finding:
    """`text` with the remedy `error` or `warning`, the worse of those that are there; else that all is well."""
    status = "error" if error else "warning" if warning else "ok"
    return Finding(name, status, text, error or warning)


def examine(name: str, look: Callable[..., Iterable[Finding]], *given) -> list[Finding]:
    """What `look` finds; an error of ours that it meets is a finding too, which has its own remedy."""
    found = []
    try:
        for one in look(*given):
            found.append(one)
    except PpldmError as error:
        found.append(Finding(name, "error", str(error)))
    return found


def log_findings(found: Iterable[Finding]) -> None:
    """A warning in the log for each that is not sound."""
    for one in found:
        if one.status != "ok":
            get_logger().warning("doctor: %s: %s%s", one.name, one.text, f"; {one.fix}" if one.fix else "")
