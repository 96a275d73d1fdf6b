"""Pictures from prompts: `ppldm generate` as a script, for paddle.distributed.launch and for older command lines."""

import sys

from ppldm.utils.processes.signals import answer_interrupts

if __name__ == "__main__":
    answer_interrupts()  # Ctrl-C is one line, during imports too
    from ppldm.cli.main import run
    from ppldm.utils.errors import exit_on_error

    with exit_on_error():
        run(["generate", *sys.argv[1:]])
