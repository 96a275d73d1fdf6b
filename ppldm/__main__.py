"""`python -m ppldm` is `ppldm`."""

from .utils.processes.signals import answer_interrupts


def main() -> None:
    """The console script `ppldm`."""
    answer_interrupts()
    from .cli.main import main as run_command_line

    run_command_line()


if __name__ == "__main__":  # worker processes import this file
    main()
