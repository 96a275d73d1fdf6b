"""What our training step costs:  python benchmarks/train_step.py [--networks tiny middle 12] [--quick] [--json [OUT]]

Three measurements of each size of networks (ppldm/config/networks: 5 M trained parameters, 11 M, and the published 12
layers with 1 G, which takes 20 GB of memory), each in processes of its own, on pictures that it makes itself:

- overhead: our step (`train_step` and what is reported after it) against a bare loop over the same modules, with the
  same batches and an optimizer of the same settings. The two take turns, step by step, on one thread, and each keeps
  its least CPU time, so that other load on the machine hurts little, and both alike. Two models of 12 layers do not
  fit beside each other: there each loop has a process of its own, with the same settings;
- settings: our step with the threads and the MKL path that ppldm chooses, against the bare loop without (the two take
  turns, process by process);
- data: the share of time that a run, with 2 loader workers, waits for batches.

OMP_NUM_THREADS and MKL_DEBUG_CPU_TYPE of the environment are left out: choosing them is what is measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from results import add_result_flags, processor, save_results

ROOT = Path(__file__).resolve().parents[1]
MAX_LENGTH = 12
NETWORKS = ("tiny", "middle", "12")
FIT_TWICE = ("tiny", "middle")  # two trainings in one process
MOST_OVERHEAD, LEAST_SPEEDUP, MOST_WAIT = 0.03, 1.5, 0.02  # the bars; the second is for AMD processors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of each kind in the first measurement")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind in the second")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["tiny"], help="sizes to measure")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--resolution", type=int, default=128, help="side of the pictures, 8 times the latents")
    parser.add_argument("--rows", type=int, default=64, help="photographs to make; they are read again and again")
    parser.add_argument("--quick", action="store_true", help="a few steps, once: to see that it runs")
    add_result_flags(parser, "train_step")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # kind, folder
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.repeats, arguments.rows, arguments.resolution = 3, 1, 16, 48
    if arguments.measure:
        kind, folder = arguments.measure
        return sys.stdout.write(json.dumps(MEASUREMENTS[kind](Path(folder), arguments)) + "\n")
    results = {}
    for networks in arguments.networks:
        with tempfile.TemporaryDirectory() as folder:
            results[networks] = compare(Path(folder), arguments, networks)
        sys.stdout.write(table(networks, results[networks]) + "\n\n")
        sys.stdout.flush()
    save_results(arguments, results)


def compare(folder: Path, arguments: argparse.Namespace, networks: str) -> dict:
    """Everything there is to say, as JSON has it. Seconds a step, the fastest of each kind."""
    load_before = os.getloadavg()[0]
    arguments = argparse.Namespace(**{**vars(arguments), "networks": [networks]})
    run("prepare", folder, arguments)
    one_thread = {"OMP_NUM_THREADS": "1"}
    if networks in FIT_TWICE:
        turns = run("turns", folder, arguments, **one_thread)
    else:
        turns = {kind: run(kind, folder, arguments, **one_thread) for kind in ("ours", "bare")}
        turns["parameters"] = turns["ours"]["parameters"]
    tuned, untuned = [], []
    for _ in range(arguments.repeats):
        tuned.append(run("ours", folder, arguments))
        untuned.append(run("bare", folder, arguments, PPLDM_NO_CPU_TUNING="1"))
    fastest, slowest = (min(found["seconds"] for found in several) for several in (tuned, untuned))
    return {
        "batch_size": arguments.batch_size,
        "resolution": arguments.resolution,
        "parameters": turns["parameters"],
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "overhead": {**turns, "share": turns["ours"]["cpu"] / turns["bare"]["cpu"] - 1},
        "settings": {
            "ours": fastest,
            "bare_without": slowest,
            "threads": tuned[0]["threads"],
            "threads_without": untuned[0]["threads"],
            "speedup": slowest / fastest,
        },
        "data": run("data", folder, arguments),
    }


def run(kind: str, folder: Path, arguments: argparse.Namespace, **variables: str) -> dict:
    """A measurement in a process of its own."""
    chosen = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE", "PPLDM_NO_CPU_TUNING")
    environ = {name: value for name, value in os.environ.items() if name not in chosen}
    command = [sys.executable, __file__, "--measure", kind, str(folder)]
    for name in ("steps", "batch_size", "resolution", "rows"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += ["--networks", *arguments.networks]
    environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")]), **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode:
        sys.exit(f"{kind} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def prepare(folder: Path, arguments: argparse.Namespace) -> dict:
    """Write the photographs, a tokenizer and an autoencoder into `folder`."""
    from photographs import make_rows

    from ppldm.data.filelist import write_filelist
    from ppldm.data.formats.part import write_part
    from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
    from ppldm.networks.build import build_network, save_component
    from ppldm.networks.configs import read_new_config

    rows = make_rows(arguments.rows)
    write_part(folder / "part-00000.gz", rows)
    write_filelist(folder / "train.filelist", ["part-00000.gz"])
    CaptionTokenizer(build_vocab([row.caption for row in rows]), MAX_LENGTH).save(folder / "tokenizer")
    save_component(build_network("vae", read_new_config("vae", "vae_tiny", ""), seed=0), folder / "vae")
    return {}


def prepare_run(folder: Path, arguments: argparse.Namespace, name: str, workers: int = 0, **changes):
    """A TrainingRun of the hand-written loop, as its script makes it; call it inside `entry()`."""
    from ppldm.training.commands.train import read_recipe
    from ppldm.training.prepare import prepare as prepare_run

    settings = {
        "output_dir": folder / name,
        "overwrite_output_dir": True,
        "file_list": folder / "train.filelist",
        "vae_name_or_path": folder / "vae",
        "text_encoder_config_file": f"ldmbert_{arguments.networks[0]}",
        "unet_config_file": f"unet_{arguments.networks[0]}",
        "tokenizer_name": folder / "tokenizer",
        "model_max_length": MAX_LENGTH,
        "resolution": arguments.resolution,
        "per_device_train_batch_size": arguments.batch_size,
        "gradient_accumulation_steps": 1,
        "max_steps": 1_000_000,
        "logging_steps": 10,
        "dataloader_num_workers": workers,
        "image_logging_steps": 0,
        "report_to": "none",
        **changes,
    }
    flags = [word for flag, value in settings.items() for word in (f"--{flag}", str(value))]
    recipe = read_recipe(flags, loop=True)
    return prepare_run(recipe.model, recipe.data, recipe.training)


def our_step(run):
    """A function of a batch: one update as the loop does it, metrics included."""
    from ppldm.training.optimizer import autocast
    from ppldm.training.report import Reporter
    from ppldm.training.train import UpdateGuard, train_step

    referee = UpdateGuard(run.state, run.world, run.arguments.max_skipped_updates, autocast(run.arguments))
    reporter, steps = Reporter(run).__enter__(), iter(range(1, run.max_steps))

    def step(batch):
        run.state.model.train()
        reporter.after_update(next(steps), train_step(referee, [batch]), [batch])

    return step


def bare_step(run):
    """A function of a batch: the same mathematics by hand over the same modules, and nothing else."""
    import paddle

    model = run.state.model
    model.train()
    vae, text_encoder, unet, alphas_cumprod = model.vae, model.text_encoder, model.unet, model.levels
    parameters = [p for p in model.parameters() if not p.stop_gradient]
    optimizer = paddle.optimizer.AdamW(5e-5, parameters=parameters, weight_decay=1e-2)

    def step(batch):
        with paddle.no_grad():
            posterior = vae.encode(batch["pixel_values"].astype("float32") / 127.5 - 1.0).latent_dist
            latents = (posterior.mean + posterior.std * batch["posterior_noise"]) * vae.config.scaling_factor
            alpha_bar = alphas_cumprod[batch["timesteps"]].reshape([-1, 1, 1, 1])
            noisy = alpha_bar**0.5 * latents + (1.0 - alpha_bar) ** 0.5 * batch["noise"]
        context = text_encoder(batch["input_ids"])[0]
        predicted = unet(noisy, batch["timesteps"], encoder_hidden_states=context).sample
        loss = paddle.nn.functional.mse_loss(predicted, batch["noise"])
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        float(loss)

    return step


def measure_turns(folder: Path, arguments: argparse.Namespace) -> dict:
    """Both kinds of step in turn."""
    runs = {name: prepare_run(folder, arguments, name) for name in ("ours", "bare")}
    steps = {"ours": our_step(runs["ours"]), "bare": bare_step(runs["bare"])}
    batches, times = _some_batches(runs["ours"]), {"ours": [], "bare": []}
    for number in range(arguments.steps + 2):
        for name, step in steps.items():
            times[name].append(_time(step, batches[number % len(batches)]))
    return {name: _figures(pairs) for name, pairs in times.items()} | {"parameters": _num_trained(runs["ours"])}


def measure_one(kind: str, folder: Path, arguments: argparse.Namespace) -> dict:
    """One kind of step alone."""
    run = prepare_run(folder, arguments, "alone")
    step, batches = (our_step if kind == "ours" else bare_step)(run), _some_batches(run)
    times = [_time(step, batches[number % len(batches)]) for number in range(arguments.steps // 2 + 2)]
    return {
        **_figures(times),
        "parameters": _num_trained(run),
        "threads": os.environ.get("OMP_NUM_THREADS", "1 (Paddle's default)"),
    }


def measure_data(folder: Path, arguments: argparse.Namespace) -> dict:
    """Shares of time that the intervals of a run with 2 workers waited for data, the first left out. It saves nothing:
    copies of 12 layers would not fit into memory."""
    from ppldm.training.metrics import read_metrics
    from ppldm.training.train import timed_batches

    every = max(2, arguments.steps // 3)
    run = prepare_run(folder, arguments, "data", workers=2, logging_steps=every)
    step = our_step(run)
    with closing(iter(timed_batches(run.batches(), run.interval, 0, 0))) as batches:
        for _ in range(4 * every):
            step(next(batches))
    shares = [record["data_wait_share"] for record in read_metrics(folder / "data/metrics.jsonl")][1:]
    return {"workers": 2, "share": min(shares), "shares": shares}


def in_entry(measurement):
    """The measurement inside what every training script does first: the CPU is prepared before Paddle is imported."""

    def measure(folder: Path, arguments: argparse.Namespace) -> dict:
        from ppldm.utils.entry import entry

        with entry():
            return measurement(folder, arguments)

    return measure


MEASUREMENTS = {
    "prepare": in_entry(prepare),
    "turns": in_entry(measure_turns),
    "ours": in_entry(lambda folder, arguments: measure_one("ours", folder, arguments)),
    "bare": in_entry(lambda folder, arguments: measure_one("bare", folder, arguments)),
    "data": in_entry(measure_data),
}


def _some_batches(run, count: int = 4) -> list[dict]:
    batches = iter(run.batches())
    return [next(batches) for _ in range(count)]


def _figures(times: list[tuple[float, float]]) -> dict:
    """Of (seconds, CPU seconds) of each step, the first two left out."""
    seconds, cpu = zip(*times[2:], strict=True)
    return {"cpu": min(cpu), "cpu_median": statistics.median(cpu), "seconds": min(seconds)}


def _num_trained(run) -> int:
    return int(sum(parameter.size for parameter in run.state.model.trained_parameters().values()))


def _time(step, batch: dict) -> tuple[float, float]:
    """Seconds of a step, by the clock and of this process's CPU time."""
    started, cpu_started = time.perf_counter(), time.process_time()
    step(batch)
    return time.perf_counter() - started, time.process_time() - cpu_started


def table(networks: str, results: dict) -> str:
    """The results of one size of networks as text."""
    overhead, settings, data = results["overhead"], results["settings"], results["data"]

    turns = "one thread" + ", in turn" * (networks in FIT_TWICE)

    def verdict(held: bool) -> str:
        return "held" if held else "NOT HELD"

    return "\n".join(
        [
            f"{processor()}, {len(os.sched_getaffinity(0))} cores, load {results['load_before']:.1f} before, "
            f"{results['load_after']:.1f} after",
            f"networks {networks}: {results['parameters'] / 1e6:.1f} M trained parameters, "
            f"batch {results['batch_size']}, {results['resolution']} px",
            "",
            f"{turns:<38}{'least CPU s':>12}{'median CPU s':>14}{'fastest s':>11}",
            *(
                f"{name:<38}{found['cpu']:>12.3f}{found['cpu_median']:>14.3f}{found['seconds']:>11.3f}"
                for name, found in (("bare loop", overhead["bare"]), ("our step", overhead["ours"]))
            ),
            f"  overhead {overhead['share']:+.1%} (bar: at most {MOST_OVERHEAD:.0%}): "
            f"{verdict(overhead['share'] <= MOST_OVERHEAD)}",
            "",
            f"{'in processes of their own':<64}{'fastest s':>11}",
            f"{'bare loop, threads ' + str(settings['threads_without']):<64}{settings['bare_without']:>11.3f}",
            f"{'our step, threads ' + str(settings['threads']):<64}{settings['ours']:>11.3f}",
            f"  {settings['speedup']:.2f} times as fast (bar: {LEAST_SPEEDUP} on AMD processors): "
            f"{verdict(settings['speedup'] >= LEAST_SPEEDUP)}",
            "",
            f"waited for data, {data['workers']} workers: {data['share']:.2%} of the time at best, intervals "
            f"{', '.join(f'{share:.2%}' for share in data['shares'])} (bar: under {MOST_WAIT:.0%}): "
            f"{verdict(data['share'] < MOST_WAIT)}",
        ]
    )


if __name__ == "__main__":
    main()
