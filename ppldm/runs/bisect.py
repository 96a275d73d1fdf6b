"""Where two runs part, and why: a setting, the data, the weights, or the kind of machine.

What is recorded says it first (`compare`): settings and data by name; then what was read (`data_crc32`), the results
and the saved weights, in the order of updates. Where that leaves a question, it is put to the runs themselves, as far
as what they were made of is still there: which rows differ is seen in their batches; whose weights are not those that
the updates make, by making the updates again from the last state that both share.
"""

import numpy as np

from ..utils.errors import PpldmError
from ..weights.checkpoint_names import checkpoint_name
from . import compare
from .read import RunFolder
from .remake import machine_here, make_updates, places_of, remade, state_of


def find_parting(one: RunFolder, other: RunFolder) -> dict:
    """`cause` (setting, data, weights, machine; None where they do not part), `why` in words, the updates `first` to
    `last` in which they part, and the `comparison` (`compare.compare_runs`); JSON-ready. Raises CheckpointError."""
    found = compare.compare_open(one, other)
    seen, made = found["samples"], found["results"]
    equal, state = _saved(one, other)
    spans = [(step["first"], step["last"]) for step in (seen, made) if step]
    if state:
        spans.append((equal + 1, state["step"]))
    first, last = min(spans, key=lambda span: span[1]) if spans else (None, None)
    report = {"cause": None, "why": ["nothing that both have recorded differs"], "first": first, "last": last}
    if found["settings"]:
        report |= {"cause": "setting", "why": [compare.name_values(item) for item in found["settings"]]}
    elif found["data"] or (seen and (not made or seen["last"] <= made["last"])):
        what = found["data"] or "the files are called and indexed alike, and what was read of them is not the same"
        report |= {"cause": "data", "why": [what, *_rows(one, other, seen)]}
    elif spans and found["machine"] and (not made or made["relative"] <= compare.CLOSE):
        names = map(compare.name_values, found["machine"])
        size = f"; results differ by {made['relative']:.2g} at first" if made else ""
        report |= {"cause": "machine", "why": ["the same but for the kind of machine: " + ", ".join(names) + size]}
    elif spans:
        report |= {"cause": "weights", "why": _weights(one, other, first, last, found, state)}
    return report | {"comparison": found}


def describe_parting(report: dict) -> str:
    """A report of `find_parting` for people."""
    cause, first, last = report["cause"], report["first"], report["last"]
    where = f"in update {last}" if first == last else f"in updates {first} to {last}"
    head = "the runs do not part" if cause is None else f"cause: {cause}; the runs part {where}"
    if cause and first is None:
        head = f"cause: {cause}; no update that both have made shows it"
    return "\n".join(
        [head, *(f"  {line}" for line in report["why"]), compare.describe_comparison(report["comparison"])]
    )


def _saved(one: RunFolder, other: RunFolder) -> tuple[int, dict | None]:
    """(the last update after which both have saved the same, the first tensor of the first checkpoints that differ)."""
    equal = 0
    for step in sorted(one.checkpoints.keys() & other.checkpoints.keys()):
        if found := compare.find_tensor(one.checkpoints[step], other.checkpoints[step]):
            return equal, {"step": step, **found}
        equal = step
    return equal, None


def _rows(one: RunFolder, other: RunFolder, seen: dict | None) -> list[str]:
    """Which rows of the updates in which the runs have read different things differ, as far as both can be read."""
    if not seen:
        return ["no update that both have made has read it"]
    try:
        mine, theirs = (_read(run, seen["first"], seen["last"]) for run in (one, other))
    except PpldmError as error:
        return [f"which rows cannot be said: {error}"]
    for step, samples in mine.items():
        pairs = [(a, b) for a, b in zip(samples, theirs[step], strict=True) if a != b]
        if pairs:
            rows = ", ".join(f"{a[0]}" if a[0] == b[0] else f"{a[0]} and {b[0]}" for a, b in pairs)
            return [f"update {step} is the first to read it: row {rows}"]
    return ["what both read now is the same: it was something else then"]


def _read(run: RunFolder, first: int, last: int) -> dict[int, list[tuple[int, int]]]:
    """(row, CRC-32) of the samples of some updates, by update."""
    with remade(run, first) as again:
        found = {}
        for step in range(first, last + 1):
            batches = [again.dataset.make_batch(places) for places in places_of(again, step)]
            found[step] = [
                pair for one in batches for pair in zip(one["row_ids"].tolist(), one["checksums"].tolist(), strict=True)
            ]
    return found


def _weights(one: RunFolder, other: RunFolder, first: int, last: int, found: dict, state: dict | None) -> list[str]:
    """Which tensor, and whose. `found`: how the runs compare; `state`: the first checkpoints that differ, and how."""
    agree_to = found["results"]["first"] - 1 if found["results"] else found["lines"]["until"]
    why = [f"settings, data and samples are the same, and the logs agree to update {agree_to}"]
    if state:
        why.append(f"{checkpoint_name(state['step'])}: {compare.describe_tensor(state)}")
    for run, that in ((one, other), (other, one)):
        try:
            return why + _make_again(run, that, first, last)
        except PpldmError as error:
            why.append(f"{run.folder} cannot be made again: {error}")
    return why


def _make_again(run: RunFolder, that: RunFolder, first: int, last: int) -> list[str]:
    """What updates `first` to `last` of `run` make, and which of the two has that."""
    right, said = {run.folder: True, that.folder: True}, []
    pairs = {line.last: (line, theirs) for line, theirs in compare.same_intervals(run, that)}
    with remade(run, first) as again:
        start = again.start_step
        for made in make_updates(run, again, last):
            if made.values and made.step in pairs:
                values = compare.finite(made.values)
                for owner, line in zip((run, that), pairs[made.step], strict=True):
                    names = [
                        name for name in (*compare.RESULTS, *compare.READ) if name in line.values and name in values
                    ]
                    right[owner.folder] &= all(line.values[name] == values[name] for name in names)
            state = state_of(again) if made.step in {*run.checkpoints, *that.checkpoints} else {}
            for owner in (run, that):
                is_due = state and made.step in owner.checkpoints and right[owner.folder]
                if is_due and (found := _differing_state(owner, made.step, state)):
                    right[owner.folder] = False
                    what = f"{owner.folder}/{checkpoint_name(made.step)}"
                    said.append(f"{what} is not what its updates make: {compare.describe_tensor(found)}")
    begin = checkpoint_name(start) if start else "the beginning"
    wrong = [str(folder) for folder, is_right in right.items() if not is_right]
    if len(wrong) == 1:
        said.append(f"made again from {begin} of {run.folder}, the updates are those of the other run: {wrong[0]} went "
                    "on from weights that were changed")  # fmt: skip
    elif wrong:
        here = ", ".join(item["name"] for item in machine_here(run, last))
        said.append(f"made again from {begin} of {run.folder}, the updates are those of neither"
                    + (f"; this machine is another: {here}" if here else ""))  # fmt: skip
    return said


def _differing_state(run: RunFolder, step: int, state: dict[str, dict[str, np.ndarray]]) -> dict | None:
    saved = {file: compare.state_tensors(run.checkpoints[step], file) for file in compare.STATE_FILES if file in state}
    return next((found for file in saved if (found := compare.differing_tensor(saved[file], state[file]))), None)
