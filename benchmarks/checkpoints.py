"""How long training waits for a checkpoint:  python benchmarks/checkpoints.py [--millions 100] [--json [OUT]]

A layer of so many million parameters with AdamW's moments and an average is saved in turns as training waits for it
(written, read back and compared) and beside the training (copied to host memory; the first copy, into memory that was
never used, apart); and what a step of matrix products takes alone, and while such a save is being written.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import paddle
from results import add_result_flags, save_results

from ppldm.networks.ema import ExponentialMovingAverage
from ppldm.training.checkpoint import TrainerState, TrainingState, contents_of, count_bytes, save_checkpoint
from ppldm.training.run import BackgroundSaves

MOST_SHARE = 0.1  # the bar: what training waits for the copy, by what it waits for the whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100, help="parameters")
    parser.add_argument("--repeats", type=int, default=3)
    add_result_flags(parser, "checkpoints")
    arguments = parser.parse_args()
    state = make_state(arguments.millions * 1_000_000)
    results = {"gigabytes": round(count_bytes(contents_of(state)) / 1e9, 3), **compare(state, arguments.repeats)}
    results["share"] = round(results["copy_seconds"] / results["whole_seconds"], 4)
    print("{gigabytes} GB: training waits {whole_seconds} s, or {copy_seconds} s for the copy (the first "
          "{first_copy_seconds} s): {share:.1%} (bar {bar:.0%}); a step takes {step_beside} times as long while it is "
          "written".format(**results, bar=MOST_SHARE))  # fmt: skip
    save_results(arguments, results)


def make_state(count: int) -> TrainingState:
    """After one update, so that there are moments."""
    side = 2000
    model = paddle.nn.Sequential(*(paddle.nn.Linear(side, side) for _ in range(count // side**2)))
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters())
    model(paddle.ones([1, side])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    scheduler = paddle.optimizer.lr.LambdaDecay(1e-4, lambda _: 1.0)
    average = ExponentialMovingAverage(dict(model.named_parameters()), 0.999)
    return TrainingState(model, optimizer, scheduler, average)


def compare(state: TrainingState, repeats: int) -> dict:
    """Medians, in seconds; and of a step its ratio."""
    whole, copies, alone, beside = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, BackgroundSaves() as saves:
        for number in range(repeats + 1):
            began = time.perf_counter()
            save_checkpoint(Path(folder), contents_of(state), TrainerState(global_step=2 * number + 1), {}, 1)
            whole.append(time.perf_counter() - began)
            alone += [step_seconds() for _ in range(5)]
            began = time.perf_counter()
            contents = saves.copy(contents_of(state))
            trainer_state = TrainerState(global_step=2 * number + 2)
            saves.start(partial(save_checkpoint, Path(folder), contents, trainer_state, {}, 1))
            copies.append(time.perf_counter() - began)
            beside += [step_seconds() for _ in range(5)]
            saves.wait()
    seconds = {"whole_seconds": whole, "first_copy_seconds": copies[:1], "copy_seconds": copies[1:]}
    return {name: round(statistics.median(one), 3) for name, one in seconds.items()} | {
        "step_beside": round(statistics.median(beside) / statistics.median(alone), 2)
    }


def step_seconds() -> float:
    """Of some matrix products."""
    began, value = time.perf_counter(), paddle.ones([1000, 1000])
    for _ in range(5):
        value = paddle.tanh(value @ value)
    value.numpy()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
