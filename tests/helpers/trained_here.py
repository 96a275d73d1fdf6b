"""Trainings in the process of the tests, which has imported what they need: the same bits as by the scripts."""

from command_line import parse_arguments

from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop


def train_here(flags: list[str], loop: bool = True) -> None:
    """Train by a script's flags, under PaddleNLP's Trainer where `loop` is false."""
    run = prepare(*parse_arguments(flags if loop else [*flags, "--do_train"], loop))
    if loop:
        run_loop(run)
    else:
        from ppldm.training.trainer import run_trainer

        run_trainer(run)
