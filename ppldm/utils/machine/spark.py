"""Spark sessions: on this machine, on a cluster by its master's address, or the one that spark-submit gave."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from ..errors import DataError, EnvironmentProblem, PpldmError
from ..log import following
from ..processes.signals import handled
from ..variables import read, set_for_libraries
from .resources import count_usable_cores, parse_java_major, read_java_version

MIN_JAVA = 17  # Spark 4 wants it
DRIVER_MEMORY_GB = 1.0  # of a driver that has little to do
_INSTALL_JAVA = (
    "Debian, Ubuntu: apt-get install openjdk-17-jre-headless; Fedora, RHEL: dnf install java-17-openjdk-headless; "
    "conda: conda install openjdk=17; macOS: brew install openjdk@17"
)
_SETTINGS = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
# What decides results, and is therefore not left to a cluster's own settings.
_RESULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.variable.substitute": "false",  # else `${env:NAME}` in a text or a name is a variable's value
    "spark.sql.parquet.compression.codec": "snappy",
}


def is_submitted() -> bool:
    """Whether this program was started by spark-submit, which then says where it runs."""
    return bool(read("PYSPARK_GATEWAY_PORT"))


def check_java() -> None:
    """Raises EnvironmentProblem where there is no Java that Spark can use."""
    version = read_java_version()
    if version is None or parse_java_major(version) < MIN_JAVA:
        found = f"this is {version}" if version else "there is none here"
        raise EnvironmentProblem(f"Spark needs Java {MIN_JAVA} or newer, and {found}. {_INSTALL_JAVA}")


def escape_glob(address: str) -> str:
    """An address as Spark's readers take it, which would take signs of it for a pattern."""
    return "".join(f"\\{letter}" if letter in "*?[]{}\\" else letter for letter in address)


@contextmanager
def spark_session(master: str | None, memory_gb: float) -> Iterator:
    """A session, ended with the block unless it was there before. Raises DataError, EnvironmentProblem without Java."""
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise EnvironmentProblem(f"pyspark cannot be imported ({error}); pip install 'pyspark>=4.1,<4.2'") from error
    existing = SparkSession.getActiveSession()
    if not existing and not is_submitted():
        check_java()
        # Else workers would run the system's Python, which has no packages.
        set_for_libraries({"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable})
    interrupted = []
    try:
        builder = SparkSession.builder.appName("ppldm")
        if not is_submitted():
            builder = builder.master(master or f"local[{count_usable_cores()}]")
            builder = builder.config("spark.driver.memory", f"{memory_gb * 1000:.0f}m")
        spark = existing or builder.config(map=_SETTINGS).getOrCreate()
        for name, value in _RESULTS.items():
            spark.conf.set(name, value)
        with _noting_ctrl_c() as interrupted:
            yield spark
    except (PySparkException, Py4JError) as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise DataError(f"Spark failed: {describe_error(error)}; PPLDM_DEBUG=1 shows all it said") from error
    finally:
        if not existing and (started := SparkSession.getActiveSession()):
            started.stop()


@contextmanager
def spark_session_if(wanted: bool, master: str | None, memory_gb: float) -> Iterator:
    """A `spark_session` where it is wanted, else None."""
    with spark_session(master, memory_gb) if wanted else nullcontext() as spark:
        yield spark


@contextmanager
def _noting_ctrl_c() -> Iterator[list]:
    """A list that is empty until Ctrl-C: Spark's own handler of it cancels all jobs, and often ends in an error."""
    interrupted, handler = [], signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()

    def note(number, frame):
        interrupted.append(number)
        handler(number, frame)

    with handled([signal.SIGINT] if is_main and callable(handler) else [], note):
        yield interrupted


@contextmanager
def following_tasks(spark, name: str, num_tasks: int, num_stages: int = 2) -> Iterator[None]:
    """A progress bar over the tasks of what Spark does in the block; `num_tasks` are those of the last stage, known
    before it begins. The total grows with the stages before that one; of `num_stages`, at least that many are known."""
    tracker, group = spark.sparkContext.statusTracker(), f"ppldm {name}"

    def measure() -> tuple[int, int]:
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(group))
        numbers = {number for job in jobs if job for number in job.stageIds}
        # Of a stage that is there already from an earlier job, Spark lists a copy that never begins.
        stages = filter(None, map(tracker.getStageInfo, sorted(numbers)))
        begun = [stage for stage in stages if stage.numActiveTasks + stage.numCompletedTasks > 0]
        is_last = len(begun) >= num_stages and begun[-1].numTasks == num_tasks
        total = sum(stage.numTasks for stage in begun) + (0 if is_last else num_tasks)
        return sum(stage.numCompletedTasks for stage in begun), total

    spark.sparkContext.setJobGroup(group, name)
    try:
        with following(measure, desc=name, unit="task"):
            yield
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


def run_tasks(spark, name: str, asked: Sequence, act: Callable, is_lenient: bool = False) -> Iterator[tuple]:
    """(each of `asked`, what `act` makes of it in a task of its own). Raises the first error at the end; if lenient,
    an error of ours is a result."""
    with following_tasks(spark, name, len(asked), num_stages=1):
        found = spark.sparkContext.parallelize(asked, len(asked)).map(partial(attempt, act)).collect()
    for one in found:
        if isinstance(one, PpldmError) and not is_lenient:
            raise one
    return zip(asked, found, strict=True)


def attempt(act: Callable, *arguments):
    """What `act` gives, or its error for the driver: Spark would wrap it in two pages of Java."""
    try:
        return act(*arguments)
    except PpldmError as error:
        return error


def describe_error(error: Exception) -> str:
    """The line of a Java trace that says most: its last cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    return (causes[-1].removeprefix("Caused by: ") if causes else " ".join(lines[:2]))[:300]
