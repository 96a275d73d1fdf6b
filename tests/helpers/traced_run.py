"""One training, and the files of ppldm that it goes through:  python traced_run.py OUT.json FLAGS

Runs `ppldm train FLAGS` in this process, and ends it at update LATER + 1. OUT gets lists of files below ppldm/:
`first_update`, where a function is entered from main() to the first step of the optimizer; `later_update`, the same
from step LATER to the next; `imported`, the modules that are there after the first update. What only an import calls
(decorators, fields of a dataclass) is not entered; other threads are not followed.
"""

import json
import os
import sys
from inspect import CO_OPTIMIZED
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[2] / "ppldm") + "/"
LATER = 12
STEPS = ("/paddle/optimizer/adamw.py", "/ppldm/training/distributed/sharding.py")


class Trace:
    """What `sys.settrace` calls at each function. `entered[n]`: the files between the steps n and n + 1."""

    def __init__(self, out: str):
        self.out, self.entered, self.imported = Path(out), [set()], []

    def __call__(self, frame, event, arg) -> None:
        path = frame.f_code.co_filename
        if frame.f_code.co_name == "step" and path.endswith(STEPS) and frame.f_back.f_code.co_name != "step":
            self.begin_step()
        if path.startswith(PACKAGE) and path not in self.entered[-1] and not is_imported(frame):
            self.entered[-1].add(path)

    def begin_step(self) -> None:
        self.entered.append(set())
        if len(self.entered) == 3:  # between these two steps the first update was finished
            self.imported = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
        if len(self.entered) == LATER + 2:
            files = {"first_update": self.entered[0], "later_update": self.entered[LATER], "imported": self.imported}
            below = {k: sorted(one[len(PACKAGE) :] for one in v if one.startswith(PACKAGE)) for k, v in files.items()}
            self.out.write_text(json.dumps(below))
            os._exit(0)


def is_imported(frame) -> bool:
    """Whether these are a module's or a class's own lines, or called by them."""
    while frame is not None:
        if not frame.f_code.co_flags & CO_OPTIMIZED and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    from ppldm.cli.main import main

    out, sys.argv[1:] = sys.argv[1], ["train", *sys.argv[2:]]
    sys.settrace(Trace(out))
    main()
    sys.exit(f"the run ended before update {LATER + 1}")
