"""Does everything that needs a GPU, or another device than a CPU, work on this one?

    bash run_scripts/accept_gpu.sh [--device KIND] [--out DIR] [--dry-run]

Short trainings by the real scripts, one for each switch that a machine without one cannot try: half precision, fused
attention, TF32, cuDNN's search, fused AdamW, compilation; PaddleNLP's Trainer; two cards, sharded too; runs that are
killed or stopped and go on. Each is compared with a reference run, update by update, in its losses, speed and memory.
It takes about 20 minutes on one or two cards; what takes two is left out on one. OUT/report.json has every figure, and
as its first entry the table that is printed. Exit status 1 if anything failed.

Data, weights and captions are made here; nothing is downloaded.
"""

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from accept_cases import (
    CASES,
    PYTHON,
    ROOT,
    SIZES,
    Case,
    Settings,
    autoencoder_command,
    data_command,
    folder_of,
    slug,
    train_command,
    why_not,
)

from ppldm.utils.machine import devices, nvidia_smi
from ppldm.utils.machine import resources as machine


def try_case(case: Case, settings: Settings, seconds: float) -> dict:
    """Run a case for at most so many seconds: its outcome so far, its losses, speed and memory."""
    command, began = train_command(case, settings), time.monotonic()
    log = settings.out / "logs" / f"{slug(case)}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    found = {"name": case.name, "command": shlex.join(command)}
    problem = None
    if case.stop:
        problem = stop_midway(case, command, settings, log, seconds)
    if problem is None:
        left = seconds - (time.monotonic() - began)
        with started(command, log) as process:
            status = wait(process, left)
        if status is None:
            problem = f"was not done after {seconds:.0f} s"
        elif status:
            problem = next((line for line in reversed(log.read_text().splitlines()) if line.startswith("error: ")),
                           f"ended with status {status}, see {log}")  # fmt: skip
    found["seconds"] = round(time.monotonic() - began, 1)
    found |= read_figures(folder_of(case, settings) / "metrics.jsonl")
    outcome, why = judge(found, problem, settings, log.read_text(errors="replace"))
    return found | {"outcome": outcome, "why": why}


def judge(found: dict, problem: str | None, settings: Settings, log: str) -> tuple[str, str]:
    """The outcome by what the run itself left, and why."""
    kind = settings.kind
    if problem:
        lacking = "says Paddle" in problem or (not kind.efficient_attention and "needs a GPU" in problem)
        return "not run" if lacking else "failed", problem
    if len(found["losses"]) != settings.steps:
        return "failed", f"{len(found['losses'])} of {settings.steps} updates were logged"
    if kind.own_memory and not found["on_device"]:
        return (
            "failed",
            f"it ran on the CPU: is Paddle for {kind.words} installed? bash run_scripts/setup.sh installs it",
        )
    if f"does nothing on {kind.words}" in log or "do nothing, this is float32" in log:
        return "no effect", f"{kind.words} has no such switch"
    return "passed", ""


def stop_midway(case: Case, command: list[str], settings: Settings, log: Path, seconds: float) -> str | None:
    """Start the command and send the signal after its first checkpoint. What went wrong; None where nothing did."""
    folder, ends = folder_of(case, settings), time.monotonic() + seconds
    with started(command, log) as process:
        while process.poll() is None and not list(folder.glob("checkpoint-*/manifest.json")):
            if time.monotonic() > ends:
                break
            time.sleep(0.02)
        else:
            if process.poll() is None:
                return send(process, case.stop, ends)
    return f"no checkpoint to be stopped after; see {log}"


def send(process: subprocess.Popen, number: signal.Signals, ends: float) -> str | None:
    """Send the signal (SIGKILL to all that the process started, too) and look whether it ends as documented."""
    if number == signal.SIGKILL:
        stop(process)
        return None
    process.send_signal(number)
    status = wait(process, ends - time.monotonic())
    return None if status == os.EX_TEMPFAIL else f"{number.name} ended it with status {status}, not {os.EX_TEMPFAIL}"


@contextmanager
def started(command: list[str], log: Path):
    """The command in a session of its own, writing to the end of `log`; killed where it outlives the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(log, "a") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            stop(process)


def wait(process: subprocess.Popen, seconds: float) -> int | None:
    """Its exit status, or None where it is not done after so many seconds."""
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def stop(process: subprocess.Popen) -> None:
    """Kill it and all that it started at once, as a machine that fails does."""
    import psutil

    if process.poll() is None:
        for one in (*psutil.Process(process.pid).children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def read_figures(metrics: Path) -> dict:
    """Losses, pictures a second (the median of the second half) and peak memory, from a run's metrics."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    records = [record for record in records if "loss" in record]
    speeds = [record["images_per_second"] for record in records[len(records) // 2 :] if "images_per_second" in record]
    last = records[-1] if records else {}
    return {
        "losses": [record["loss"] for record in records],
        "images_per_second": round(statistics.median(speeds), 3) if speeds else None,
        "on_device": "peak_device_memory_gb" in last,
        "peak_memory_gb": last.get("peak_device_memory_gb", last.get("peak_memory_gb")),
    }


def difference(losses: list, reference: list) -> float:
    """The largest relative difference at any update; infinite where a loss is not finite or one is missing."""
    if (
        len(losses) != len(reference)
        or not losses
        or any(x is None or not math.isfinite(x) for x in losses + reference)
    ):
        return math.inf
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference, strict=True))


def compare(found: dict, case: Case, reference: dict | None) -> dict:
    """The outcome with the difference from the reference, and the speed beside its."""
    if case.name == case.reference:
        gap = difference(found["losses"], found["losses"])
    elif reference is None or reference["outcome"] not in ("passed", "no effect"):
        return found | {"difference": None, "bar": case.bar, "speed_ratio": None}
    else:
        gap = difference(found["losses"], reference["losses"])
    base = reference or found
    speeds = found["images_per_second"], base["images_per_second"]
    found = found | {
        "difference": gap if math.isfinite(gap) else None,
        "bar": case.bar,
        "speed_ratio": round(speeds[0] / speeds[1], 3) if all(speeds) else None,
    }
    if found["outcome"] in ("passed", "no effect") and not gap <= case.bar:
        found |= {"outcome": "failed", "why": f"losses are off by {gap:.2g}, more than {case.bar:.2g}"}
    return found


def count_cards(kind: devices.Kind) -> int:
    """How many devices Paddle finds; asked in a process of its own, which gives their memory back."""
    program = f"from ppldm.utils.machine import devices as d; print(d.count_devices(d.KINDS[{kind.name!r}]))"
    return int(subprocess.run([PYTHON, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def run_all(cases, settings: Settings, minutes: float) -> list[dict]:
    """Every case in turn, until the time is over."""
    ends, cards, results = time.monotonic() + minutes * 60, count_cards(settings.kind), []
    for number, case in enumerate(cases, start=1):
        left = ends - time.monotonic()
        reason = why_not(case, settings, cards) or ("the time was over (--minutes)" if left < 1 else None)
        if reason:
            found = {"name": case.name, "outcome": "not run", "why": reason}
        else:
            print(f"[{number}/{len(cases)}] {case.name} ...", file=sys.stderr, flush=True)
            reference = next((one for one in results if one["name"] == case.reference), None)
            found = compare(try_case(case, settings, left), case, reference)
        results.append(found)
        print(row(found), file=sys.stderr, flush=True)
    return results


def describe_machine(kind: devices.Kind) -> dict:
    """Where this ran."""
    versions = subprocess.run(
        [PYTHON, "-c", "from importlib.metadata import distributions as d; import json; print(json.dumps({i.name: "
         "i.version for i in d() if i.name.startswith(('paddle', 'ppdiffusers', 'nvidia'))}))"],
        capture_output=True, text=True,
    )  # fmt: skip
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "commit": commit.stdout.strip() or None,
        "devices": [str(gpu) for gpu in nvidia_smi.list_gpus()] if kind == devices.GPU else [kind.words],
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": machine.count_usable_cores(),
        "versions": json.loads(versions.stdout or "{}"),
    }


HEADER = f"{'outcome':<10}{'case':<38}{'off by':>9}{'bar':>8}{'img/s':>9}{'ratio':>7}{'GB':>7}{'s':>6}"


def row(found: dict) -> str:
    """A line of the table, and why, if there is something to say."""

    def number(name, form):
        value = found.get(name)
        return "-" if value is None else format(value, form)

    line = (
        f"{found['outcome']:<10}{found['name']:<38}{number('difference', '.1e'):>9}{number('bar', '.0e'):>8}"
        f"{number('images_per_second', '.1f'):>9}{number('speed_ratio', '.2f'):>7}{number('peak_memory_gb', '.2f'):>7}"
        f"{number('seconds', '.0f'):>6}"
    )
    return f"{line}\n{'':<10}{found['why']}" if found.get("why") else line


def make_report(results: list[dict], settings: Settings, facts: dict) -> dict:
    """Everything, the table first."""
    counts = {outcome: sum(found["outcome"] == outcome for found in results)
              for outcome in ("passed", "failed", "no effect", "not run")}  # fmt: skip
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    is_cpu = settings.kind.is_cpu
    place = f"the CPU in a GPU's place, {facts['cores']} cores" if is_cpu else "; ".join(facts["devices"])
    lines = [f"{place}; networks {settings.size.networks}, {settings.size.resolution} px, batch {settings.size.batch}",
             HEADER, *(line for found in results for line in row(found).splitlines()), summary]  # fmt: skip
    return {"table": lines, **facts, "device": settings.device, "steps": settings.steps,
            "size": settings.size.__dict__, "counts": counts, "cases": results}  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/accept_gpu", help="a new folder for everything")
    parser.add_argument(
        "--device", choices=devices.KINDS, help="what the driver shows without it; cpu tries this script"
    )
    parser.add_argument("--size", choices=SIZES, default="middle", help="of the networks (default: middle)")
    parser.add_argument("--steps", type=int, default=12, help="updates of each training (default: 12)")
    parser.add_argument("--minutes", type=float, default=20, help="begin nothing after so many (default: 20)")
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE", help="cases by name, besides the reference")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.only) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; known: {', '.join(case.name for case in CASES)}")
    if arguments.steps < 3:
        parser.error(f"--steps {arguments.steps}: at least 3 are needed, so that a run can be stopped in between")
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    out = arguments.out.absolute()
    seen = [kind.name for kind in devices.seen_kinds()]
    device = arguments.device or next(iter(seen), devices.GPU.name)
    settings = Settings(out, SIZES[arguments.size], device, arguments.steps)
    cases = [case for case in CASES if not arguments.only or case.name in ("plain", *arguments.only)]
    preparation = [data_command(settings), autoencoder_command(settings)]
    if arguments.dry_run:
        for command in [*preparation, *(train_command(case, settings) for case in cases)]:
            print(shlex.join(command))
        return 0
    if device not in (devices.CPU.name, *seen):
        wanted = f"{settings.kind.words} is not to be seen" if arguments.device else "no driver of a device is"
        print(f"error: {wanted} here; --device cpu tries the script itself", file=sys.stderr)
        return 1
    if (out / "runs").exists():
        print(f"error: {out} holds an earlier run; remove it, or choose another folder with --out", file=sys.stderr)
        return 1
    for command in preparation:
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: what was started is stopped
    try:
        results = run_all(cases, settings, arguments.minutes)
    except KeyboardInterrupt:
        print("stopped; nothing is left running and there is no report", file=sys.stderr)
        return 130
    report = make_report(results, settings, describe_machine(settings.kind))
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(report["table"]))
    print(f"the report: {out / 'report.json'}")
    return int(report["counts"]["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
