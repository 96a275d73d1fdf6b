"""Pictures from prompts: `ppldm generate` as a script, for paddle.distributed.launch and for older command lines."""

import sys

from ppldm.cli.main import run
from ppldm.utils.errors import exit_on_error

if __name__ == "__main__":
    with exit_on_error():
        run(["generate", *sys.argv[1:]])
