"""DuckDB in this process: within a memory and all usable cores, and with queries that Ctrl-C ends well."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from ..errors import EnvironmentProblem
from .resources import count_usable_cores

_INTERRUPT_SECONDS = 0.1

Result = TypeVar("Result")


def load_duckdb() -> ModuleType:
    """The module. Raises EnvironmentProblem."""
    try:
        import duckdb
    except ImportError as error:
        raise EnvironmentProblem(f"DuckDB cannot be imported ({error}); pip install duckdb") from error
    return duckdb


def quote_text(text: str) -> str:
    """SQL: a text. DuckDB's parser takes no NUL within quotes."""
    quoted = "'" + text.replace("'", "''") + "'"
    return "(" + quoted.replace("\0", "' || chr(0) || '") + ")" if "\0" in text else quoted


def escape_glob(path) -> str:
    """A path as DuckDB's readers take it, which would take signs of it for a pattern."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))


def parquet_sql(paths: Iterable[Path], options: str = "") -> str:
    """SQL: the rows of these files, with their own columns and not those that a folder's name states (`year=2020`)."""
    files = ", ".join(quote_text(escape_glob(path)) for path in paths)
    return f"read_parquet([{files}], hive_partitioning = false{options})"


@contextmanager
def connect(memory_gb: float, spill: Path | None) -> Iterator:
    """A database in memory; what is over `memory_gb` goes to the folder `spill`, if any. Raises EnvironmentProblem."""
    limits = {"memory_limit": f"{memory_gb * 1000:.0f}MB", "threads": count_usable_cores()}
    with load_duckdb().connect(":memory:", config={**limits, "temp_directory": str(spill or "")}) as connection:
        yield connection


def execute(connection, query: str, take: Callable[..., Result] = lambda done: done.fetchall()) -> Result:
    """What `take` makes of a query's result: its rows, as tuples. Raises DuckDB's errors, and KeyboardInterrupt. The
    query runs in a thread of its own: where a signal meets DuckDB itself, it leaves the query while its threads are
    still reading, and may abort the process. Here it is asked to end the query, and waited for."""
    future: Future = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(take(connection.execute(query)))
            except BaseException as error:
                future.set_exception(error)

    try:
        threading.Thread(target=run).start()
        return future.result()
    except KeyboardInterrupt:
        if not future.cancel():  # else the query will not begin
            # Asked again, since DuckDB forgets what comes before the query.
            while not future.done():
                connection.interrupt()
                wait([future], _INTERRUPT_SECONDS)
        raise
