"""What a command has found, on stdout: text for people, or JSON for programs."""

import sys
from collections.abc import Callable
from json import dumps


def print_report(report, describe: Callable, as_json: bool) -> None:
    """Write `describe(report)`, text of one line or several, or the report itself as JSON."""
    text = dumps(report, indent=2, ensure_ascii=False, default=str) if as_json else describe(report)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
