"""`ppldm replay`: an update of a run made again, beside what the run has logged; or why two runs part."""

from pathlib import Path

from ..utils.errors import ConfigError
from ..utils.files import local_path, read_json
from ..utils.report import print_report
from ..utils.variables import set_for_libraries
from ..weights.folders import checkpoint_name, list_checkpoints
from ..weights.runs import one_run


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
    compute_as(one_run(run))
    from ..utils.machine.cpu import load_paddle

    load_paddle()
    from .compare import describe_parting, find_parting
    from .read import open_run

    if bisect:
        print_report(find_parting(open_run(run), open_run(bisect)), describe_parting, json)
    else:
        report = replay_update(open_run(run), step, row, local_path(pictures) if pictures else None)
        print_report(report, describe_update, json)


def compute_as(folder: Path) -> None:
    """Take the run's number of threads and the like, where the environment sets none; before paddle is imported."""
    from ..training.checkpoint.checkpoint import TUNING

    manifests = [path for one in list_checkpoints(folder) if (path := one / "manifest.json").is_file()]
    found = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
    machine = (read_json(found) or {}).get("machine", {}) if found else {}
    set_for_libraries({name: machine[name] for name in TUNING if machine.get(name)})


def replay_update(run, step: int, row: int | None = None, pictures: Path | None = None) -> dict:
    """What came of update `step` of a `RunFolder`, made again with all others of its line of the log, and what the log
    says; JSON-ready. Raises PpldmError."""
    from .compare import machine_here
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


def compare_with_log(run, lines: dict[int, dict]) -> dict | None:
    """What lines made again, by their step, say beside the run's; None where there are none. `values`: of the last, by
    name, as logged and as made again; `first_difference`: as `compare.first_difference` says."""
    from .compare import COMPARED, READ, RESULTS, finite, first_difference
    from .read import Line

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
    from .compare import CLOSE

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
    """A report of `replay_update` for people."""
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
