"""`ppldm compare`: which of two evaluations is better, or whether two runs are the same experiment, with a certificate;
`ppldm replay`: an update made again beside what the run has logged, or where two runs part, and why.

Runs are compared by what they have recorded: settings and networks by name, data part by part, and of metrics.jsonl
what was read (`data_crc32`) and what came of it (losses, norms of gradients), to the bit, where both have a line of the
same updates. Further questions are put to the runs themselves, as far as what they were made of is still there: which
rows differ is seen in their batches; whose weights are not those that the updates make, by making the updates again
from the last state that both share.
"""

from pathlib import Path
from typing import Annotated

import numpy as np

from ..data.filelist import find_difference
from ..utils.checksums import checksum_arrays, digest_of
from ..utils.errors import ConfigError, PpldmError
from ..utils.files import local_path, read_json
from ..utils.machine.cpu import load_paddle
from ..utils.processes.ranks import World
from ..utils.text import print_report
from ..utils.variables import set_for_libraries
from ..weights.components import widen_bfloat16
from ..weights.folders import checkpoint_name, find_runs, is_run, list_checkpoints, one_run
from ..weights.formats.paddle_files import read_tree
from .read import Line, RunFolder, flatten, open_run

RESULTS = ("loss", "grad_norm", "loss_quarter_1", "loss_quarter_2", "loss_quarter_3", "loss_quarter_4")
READ = ("data_crc32",)
COMPARED = (*RESULTS, *READ)
CLOSE = 1e-5  # relative: sums of the same numbers in another order are no further apart
STATE_FILES = ("model_state.pdparams", "ema_state.pdparams", "ema_posthoc_state.pdparams", "optimizer.pdopt")
_FOLLOW_DATA = ("data", "rows", "max_steps")  # where the data differ, so may these
_Names = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "NAME"}]


def compare(
    a: Annotated[str, {"metavar": "A"}],  # result of `ppldm evaluate` (JSON), or a training run's folder
    b: Annotated[str, {"metavar": "B"}],  # another
    allow: _Names = (),  # settings that may differ, as drawn.guidance_scale, or whole groups, as versions
    json: bool = False,  # print the comparison as JSON
):
    """Say which of two evaluations is better, metric by metric, or whether two training runs are the same experiment.

    Refuses evaluations that cannot be compared.
    """
    if all(find_runs(local_path(one)) and not _results_in(one) for one in (a, b)):
        load_paddle()  # checkpoints are read by a module that needs it
        print_report(compare_runs(open_run(a), open_run(b)), describe_comparison, json)
        return
    from ..evaluation.compare import compare_results, describe
    from ..evaluation.measure import read_result

    report = compare_results(read_result(_result_file(a)), read_result(_result_file(b)), tuple(allow))
    print_report({"a": a, "b": b, **report}, describe, json)


def replay(
    run: str,  # the --output_dir of a run, or a folder that holds it; nothing in it is written
    step: int = None,  # the update to make again, from the nearest checkpoint before it
    row: int = None,  # show this row of its samples only, and the update that has it in this epoch
    pictures: str = None,  # write the crops, with their captions, to a PNG in this folder
    bisect: str = None,  # another run: find the first update at which the two part, and why
    json: bool = False,  # print a JSON object
):
    """Make an update of a run again and compare it with the log, to the bit; or find where and why two runs part."""
    if (step is None) == (bisect is None):
        raise ConfigError("say what to do: --step N makes update N again, --bisect RUN finds where two runs part")
    if bisect and (row is not None or pictures):
        raise ConfigError("--row and --pictures are about one update; add --step, or omit them beside --bisect")
    _compute_as(one_run(run))
    load_paddle()
    if bisect:
        print_report(find_parting(open_run(run), open_run(bisect)), describe_parting, json)
    else:
        report = replay_update(open_run(run), step, row, local_path(pictures) if pictures else None)
        print_report(report, describe_update, json)


def _compute_as(folder: Path) -> None:
    """Take the run's number of threads and the like, where the environment sets none; before paddle is imported."""
    from ..training.checkpoint import TUNING

    manifests = [path for one in list_checkpoints(folder) if (path := one / "manifest.json").is_file()]
    found = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
    machine = (read_json(found) or {}).get("machine", {}) if found else {}
    set_for_libraries({name: machine[name] for name in TUNING if machine.get(name)})


def _result_file(path: str) -> Path:
    """The file itself, or the only result in a folder. Raises ConfigError."""
    if not Path(path).is_dir():
        return Path(path)
    found = _results_in(path)
    if len(found) != 1:
        names = ", ".join(one.name for one in found[:5]) or "none"
        raise ConfigError(f"{path} holds {len(found)} results ({names}); name one")
    return found[0]


def _results_in(path: str) -> list[Path]:
    """The files of a folder that may be results; none in a run's."""
    return [] if is_run(path) else sorted(Path(path).glob("*.json"))


def compare_runs(one: RunFolder, other: RunFolder) -> dict:
    """Whether two runs are the same experiment (`same`: settings, data and all that both have logged and saved are
    equal to the bit), or where not; a certificate, JSON-ready. Raises CheckpointError."""
    end = min(one.num_updates, other.num_updates)
    data = find_difference(one.data(end), other.data(end))
    settings = different(one.settings, other.settings, _FOLLOW_DATA if data else ("data",))
    pairs, common = same_intervals(one, other), sorted(one.checkpoints.keys() & other.checkpoints.keys())
    read, results = (first_difference(pairs, names) for names in (READ, RESULTS))
    weights = common and find_tensor(one.checkpoints[common[-1]], other.checkpoints[common[-1]])
    report = {
        "same": not (data or settings or read or results or weights) and bool(pairs),
        "settings": settings,
        "data": data,
        "machine": different(one.machine(end), other.machine(end)),
        "lines": {"compared": len(pairs), "until": pairs[-1][0].last if pairs else 0},
        "samples": read,
        "results": results,
        "checkpoint": {"step": common[-1], "difference": weights} if common else None,
        "runs": [_digests(run) for run in (one, other)],
    }
    return {"verdict": _verdict(report), **report}


def describe_comparison(report: dict) -> str:
    lines = [report["verdict"]]
    for kind, found in (("setting", report["settings"]), ("machine", report["machine"])):
        lines += [f"  {kind} {one['name']}: {one['values'][0]} and {one['values'][1]}" for one in found]
    if report["data"]:
        lines.append(f"  data: {report['data']}")
    for what in ("samples", "results"):
        if found := report[what]:
            lines.append(f"  {what} differ first in updates {found['first']} to {found['last']}: {name_values(found)}")
    if (saved := report["checkpoint"]) and saved["difference"]:
        lines.append(f"  {checkpoint_name(saved['step'])}: {describe_tensor(saved['difference'])}")
    lines.append(f"  compared: {report['lines']['compared']} lines, to update {report['lines']['until']}")
    return "\n".join(lines)


def name_values(found: dict) -> str:
    return f"{found['name']} is {found['values'][0]} and {found['values'][1]}"


def _verdict(report: dict) -> str:
    for what in ("settings", "data"):
        if report[what]:
            return f"another experiment: the {what} differ"
    if not report["lines"]["compared"]:
        return "nothing to compare: no line of both is of the same updates; log with the same --logging_steps"
    if report["samples"]:
        return "not the same: the runs have read other samples"
    if report["same"]:
        return "the same experiment, to the bit"
    found = report["results"]
    if found and found["largest"] > CLOSE and not report["machine"]:
        return "not the same: of equal samples the runs made other results"
    size = f"results differ by up to {found['largest']:.2g}" if found else "saved states differ"
    on = "on machines of other kinds" if report["machine"] else "in last bits"
    return f"the same experiment {on}: {size}"


def different(one: dict, other: dict, skipped: tuple[str, ...] = ()) -> list[dict]:
    """The entries that both have and that differ: [{"name", "values": [of one, of other]}]."""
    from ..training.resume import differences

    names = (name for name in one if name in other and name not in skipped)
    found = (difference for name in names for difference in differences(name, one[name], other[name]))
    return [{"name": name, "values": values} for name, *values in found]


def same_intervals(one: RunFolder, other: RunFolder) -> list[tuple[Line, Line]]:
    """The lines of both that are of the same updates."""
    theirs = {(line.first, line.last): line for line in other.lines}
    return [(line, theirs[key]) for line in one.lines if (key := (line.first, line.last)) in theirs]


def first_difference(pairs: list[tuple[Line, Line]], names: tuple[str, ...]) -> dict | None:
    """The first lines of which a value differs: updates `first` to `last`, `name`, `values`, and by how much at most
    the values of its kind differ, relative, there (`relative`) and in all lines (`largest`)."""
    found, largest = None, 0.0
    for one, other in pairs:
        values = {
            name: [one.values[name], other.values[name]] for name in names if name in one.values.keys() & other.values
        }
        here = {name: distance for name, both in values.items() if (distance := _distance(*both))}
        largest = max([largest, *here.values()])
        if here and found is None:
            name = next(iter(here))
            found = {"first": one.first, "last": one.last, "name": name, "values": values[name]}
            found["relative"] = max(here.values())
    return found and found | {"largest": largest}


def finite(values: dict) -> dict:
    """Numbers as metrics.jsonl has them: None for what is not finite."""
    return {name: value if np.isfinite(value) else None for name, value in values.items()}


def _distance(one, other) -> float:
    """Relative; 0 of equal numbers only, infinite where only one is there."""
    if one == other:
        return 0.0
    return float("inf") if None in (one, other) else abs(one - other) / max(abs(one), abs(other))


def state_tensors(checkpoint: Path, file: str) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint's file by name, in their order; none where it is not there."""
    tree = read_tree(checkpoint / file) if (checkpoint / file).is_file() else {}
    found = {name: value[1] if isinstance(value, tuple) else value for name, value in flatten(tree).items()}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def find_tensor(one: Path, other: Path) -> dict | None:
    """The first tensor in which two checkpoints differ in a bit; None without."""
    for file in STATE_FILES:
        if found := differing_tensor(state_tensors(one, file), state_tensors(other, file)):
            return {"file": file, **found}
    return None


def differing_tensor(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict | None:
    """The first of named arrays that differ in a bit, in how many elements, by how much; and how many arrays differ."""
    changed = [name for name in one.keys() | other.keys() if _bits(one.get(name)) != _bits(other.get(name))]
    if not changed:
        return None
    name = next((name for name in one if name in changed), changed[0])
    a, b = one.get(name), other.get(name)
    found = {"tensor": name, "tensors_differing": len(changed), "tensors": len(one.keys() | other.keys())}
    if a is None or b is None or a.shape != b.shape:
        return found
    a, b = ((widen_bfloat16(one) if one.dtype == np.uint16 else one).astype(np.float64) for one in (a, b))
    return found | {"elements": int(np.count_nonzero(a != b)), "of": a.size, "largest": float(np.abs(a - b).max())}


def describe_tensor(found: dict) -> str:
    size = ""
    if "of" in found:
        size = f" in {found['elements']} of {found['of']} elements, by up to {found['largest']:.3g}"
    return f"{found['tensor']} differs{size} ({found['tensors_differing']} of {found['tensors']} tensors do)"


def _bits(array: np.ndarray | None) -> tuple | None:
    return None if array is None else (array.shape, array.dtype, array.tobytes())


def _digests(run: RunFolder) -> dict:
    """What tells a run from others: 32 hexadecimal digits of what it was told, read and made."""
    settings = {name: value for name, value in run.settings.items() if name != "data"}
    newest = max(run.checkpoints)
    return {
        "folder": str(run.folder),
        "updates": run.num_updates,
        "settings": digest_of(settings),
        "data": run.data(run.num_updates).digest,
        "samples": digest_of([[line.last, line.values.get(READ[0])] for line in run.lines]),
        "results": digest_of([[line.last, *map(line.values.get, RESULTS)] for line in run.lines]),
        "weights": {newest: checksum_arrays(state_tensors(run.checkpoints[newest], STATE_FILES[0]).items())},
        "machine": run.machine(run.num_updates),
    }


def machine_here(run: RunFolder, step: int) -> list[dict]:
    """In what this machine is another kind than that of update `step` (`different`)."""
    from ..training.checkpoint import machine_record, versions

    return different(run.machine(step), {**machine_record(World()), **versions()})


def find_parting(one: RunFolder, other: RunFolder) -> dict:
    """`cause` (setting, data, weights, machine; None where they do not part), `why` in words, the updates `first` to
    `last` in which they part, and the `comparison` (`compare_runs`); JSON-ready. Raises CheckpointError."""
    found = compare_runs(one, other)
    seen, made = found["samples"], found["results"]
    equal, state = 0, None  # the last update after which both have saved the same; the first tensor that differs then
    for step in sorted(one.checkpoints.keys() & other.checkpoints.keys()):
        if tensor := find_tensor(one.checkpoints[step], other.checkpoints[step]):
            state = {"step": step, **tensor}
            break
        equal = step
    spans = [(lines["first"], lines["last"]) for lines in (seen, made) if lines]
    if state:
        spans.append((equal + 1, state["step"]))
    first, last = min(spans, key=lambda span: span[1]) if spans else (None, None)
    report = {"cause": None, "why": ["nothing that both have recorded differs"], "first": first, "last": last}
    if found["settings"]:
        report |= {"cause": "setting", "why": [name_values(item) for item in found["settings"]]}
    elif found["data"] or (seen and (not made or seen["last"] <= made["last"])):
        what = found["data"] or "the files are called and indexed alike, and what was read of them is not the same"
        report |= {"cause": "data", "why": [what, *_rows(one, other, seen)]}
    elif spans and found["machine"] and (not made or made["relative"] <= CLOSE):
        names = map(name_values, found["machine"])
        size = f"; results differ by {made['relative']:.2g} at first" if made else ""
        report |= {"cause": "machine", "why": ["the same but for the kind of machine: " + ", ".join(names) + size]}
    elif spans:
        report |= {"cause": "weights", "why": _weights(one, other, first, last, found, state)}
    return report | {"comparison": found}


def describe_parting(report: dict) -> str:
    cause, first, last = report["cause"], report["first"], report["last"]
    where = f"in update {last}" if first == last else f"in updates {first} to {last}"
    head = "the runs do not part" if cause is None else f"cause: {cause}; the runs part {where}"
    if cause and first is None:
        head = f"cause: {cause}; no update that both have made shows it"
    return "\n".join([head, *(f"  {line}" for line in report["why"]), describe_comparison(report["comparison"])])


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
    from .remake import places_of, remade

    with remade(run, first) as again:
        found: dict[int, list[tuple[int, int]]] = {step: [] for step in range(first, last + 1)}
        for step, pairs in found.items():
            for batch in map(again.dataset.make_batch, places_of(again, step)):
                pairs += zip(batch["row_ids"].tolist(), batch["checksums"].tolist(), strict=True)
    return found


def _weights(one: RunFolder, other: RunFolder, first: int, last: int, found: dict, state: dict | None) -> list[str]:
    """Which tensor, and whose. `found`: how the runs compare; `state`: the first checkpoints that differ, and how."""
    agree_to = found["results"]["first"] - 1 if found["results"] else found["lines"]["until"]
    why = [f"settings, data and samples are the same, and the logs agree to update {agree_to}"]
    if state:
        why.append(f"{checkpoint_name(state['step'])}: {describe_tensor(state)}")
    for run, that in ((one, other), (other, one)):
        try:
            return why + _make_again(run, that, first, last)
        except PpldmError as error:
            why.append(f"{run.folder} cannot be made again: {error}")
    return why


def _make_again(run: RunFolder, that: RunFolder, first: int, last: int) -> list[str]:
    """What updates `first` to `last` of `run` make, and which of the two has that."""
    from .remake import make_updates, remade, state_of

    right, said = {run.folder: True, that.folder: True}, []
    pairs = {line.last: (line, theirs) for line, theirs in same_intervals(run, that)}
    with remade(run, first) as again:
        start = again.start_step
        for made in make_updates(run, again, last):
            if made.values and made.step in pairs:
                values = finite(made.values)
                for owner, line in zip((run, that), pairs[made.step], strict=True):
                    names = [name for name in COMPARED if name in line.values and name in values]
                    right[owner.folder] &= all(line.values[name] == values[name] for name in names)
            state = state_of(again) if made.step in {*run.checkpoints, *that.checkpoints} else {}
            for owner in (run, that):
                saved = owner.checkpoints.get(made.step)
                for file in state if saved and right[owner.folder] else ():
                    if found := differing_tensor(state_tensors(saved, file), state[file]):
                        right[owner.folder] = False
                        said.append(f"{saved} is not what its updates make: {describe_tensor(found)}")
                        break
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


def replay_update(run: RunFolder, step: int, row: int | None = None, pictures: Path | None = None) -> dict:
    """What came of update `step`, and what the log says of its line, made again; JSON-ready. Raises PpldmError."""
    from .remake import describe_samples, draw_samples, make_updates, pick_row, remade, update_of

    line = next((line for line in run.lines if line.last >= step), None)
    lines, report = {}, {"run": str(run.folder), "step": step}
    with remade(run, step) as again:
        until = line.last if line else step
        report |= {"start": again.start_step, "updates_made": until - again.start_step}
        for made in make_updates(run, again, until):
            if made.values:
                lines[made.step] = made.values
            if made.step == step:
                samples = describe_samples(again, made)
                chosen = samples if row is None else pick_row(again, samples, step, row)
                report |= {"loss": made.update.loss, "grad_norm": made.update.grad_norm, "samples": chosen}
                if row is not None:
                    report["row_is_in_update"] = update_of(again, chosen[0]["epoch"], row)
                if pictures:
                    report["picture"] = str(draw_samples(again, made, samples, pictures, chosen))
    report["log"] = compare_with_log(run, lines)
    report["machine"] = machine_here(run, step)
    return {"verdict": verdict_of(report), **report}


def compare_with_log(run: RunFolder, lines: dict[int, dict]) -> dict | None:
    """What lines made again, by their step, say beside the run's; None where there are none. `values`: of the last, by
    name, as logged and as made again; `first_difference`: as `first_difference` says."""
    pairs = [(line, Line(line.first, line.last, finite(lines[line.last]))) for line in run.lines if line.last in lines]
    if not pairs:
        return None
    logged, again = pairs[-1]
    names = [name for name in COMPARED if name in logged.values and name in again.values]
    return {
        "first": logged.first,
        "last": logged.last,
        "values": {name: [logged.values[name], again.values[name]] for name in names},
        "data": first_difference(pairs, READ),
        "results": first_difference(pairs, RESULTS),
    }


def verdict_of(report: dict) -> str:
    """One clause that says whether the update is the one in the log."""
    log = report["log"]
    if log is None:
        return "the log has no line of this update yet"
    if log["data"]:
        return f"other data: what updates {log['data']['first']} to {log['data']['last']} read is not what the run read"
    found = log["results"]
    if found is None:
        return "the update of the log, to the bit"
    size = f"differ by up to {found['largest']:.2g}, first in updates {found['first']} to {found['last']}"
    if found["largest"] <= CLOSE and report["machine"]:
        return f"the update of the log, but for last bits, on a machine of another kind: results {size}"
    return f"not the update of the log: results {size}; of the same data, so weights or arithmetic were others"


def describe_update(report: dict) -> str:
    start = checkpoint_name(report["start"]) if report["start"] else "the beginning"
    lines = [
        f"update {report['step']}: {report['verdict']}",
        f"  made again from {start}, updates: {report['updates_made']}",
        f"  loss {report['loss']!r}, norm of the gradient {report['grad_norm']!r}",
    ]
    if log := report["log"]:
        lines.append(f"  log of updates {log['first']} to {log['last']}, and made again:")
        lines += [f"    {name:<16}{values[0]!s:<24}{values[1]}" for name, values in log["values"].items()]
    lines += [f"  machine {one['name']}: then {one['values'][0]}, here {one['values'][1]}" for one in report["machine"]]
    for one in report["samples"]:
        words = [f"row {one['row']}", f"{Path(one['part']).name} row {one['row_in_part']}", f"epoch {one['epoch']}"]
        words += [f"in place of {one['in_place_of']}"] if "in_place_of" in one else []
        words += [f"{name.replace('_', ' ')} {one[name]:.6g}" for name in ("timestep", "noise_level", "loss")
                  if name in one]  # fmt: skip
        caption = f": {one['caption'] or '(no caption)'}" if "caption" in one else ""
        lines.append("  " + ", ".join(words) + caption)
    if report.get("row_is_in_update"):
        lines.append(f"  in this epoch the row is in update {report['row_is_in_update']}")
    if "picture" in report:
        lines.append(f"  drawn in {report['picture']}")
    return "\n".join(lines)
