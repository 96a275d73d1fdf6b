"""What every script that trains or draws does first: a sound environment, a prepared CPU, one-line errors."""

from contextlib import contextmanager

from .cpu import import_paddle_quietly, prepare_cpu
from .environment import require_working_environment
from .errors import exit_on_error


@contextmanager
def entry():
    """Around a script's main: check the environment, prepare the CPU before paddle is imported, print errors well."""
    with exit_on_error():
        require_working_environment()
        prepare_cpu()
        import_paddle_quietly()
        yield
