"""One training run of any family, the toy among them: python law_run.py FAMILY loop|trainer [flags]."""

import sys

from toy import FAMILY

from ppldm.families.base import get_family, register
from ppldm.training.commands.train import run_training

if __name__ == "__main__":  # worker processes import this file
    register(FAMILY)
    name, kind, *words = sys.argv[1:]
    words += ["--do_train"] if kind == "trainer" else []
    run_training(words, kind == "loop", get_family(name).Config)
