"""Laws: Ctrl-C ends a query at any moment, before it has begun too, and the connection answers the next one; an error
is DuckDB's own; what does not fit goes to the disk, or is an error without one."""

import duckdb
import pytest

from ppldm.utils.machine.duckdb import connect, execute


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3])
def test_ctrl_c_ends_a_query_and_the_connection_answers_on(ctrl_c, seconds):
    with connect(1.0, None) as connection:
        with pytest.raises(KeyboardInterrupt):
            ctrl_c(seconds)
            execute(connection, "SELECT sum(hash(a.range + b.range)) FROM range(10_000_000) a, range(10_000_000) b")
        assert execute(connection, "SELECT 1, 'two'") == [(1, "two")]


def test_errors_are_duckdbs_and_results_are_taken_as_wanted():
    with connect(1.0, None) as connection:
        with pytest.raises(duckdb.CatalogException):
            execute(connection, "SELECT * FROM nothing")
        assert execute(connection, "SELECT range FROM range(3)", lambda done: done.fetchone()) == (0,)


def test_what_does_not_fit_goes_to_the_disk(tmp_path):
    query = "CREATE TABLE sorted AS SELECT hash(range)::VARCHAR AS text FROM range(3_000_000) ORDER BY text"
    with connect(0.1, tmp_path / "spill") as connection:
        assert execute(connection, query) == [(3_000_000,)]
        assert list((tmp_path / "spill").iterdir())
    with connect(0.1, None) as connection, pytest.raises(duckdb.OutOfMemoryException):
        execute(connection, query)
