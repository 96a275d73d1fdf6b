"""Hadoop's file systems on a Spark executor, whose Python has no gateway to Java: it starts one of its own.

The process runs the classes that Spark has there, under the settings of the driver, as the user that Spark runs as; it
ends with the Python worker. It is started once for each worker, in a few seconds, and takes up to `_HEAP`.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ..utils.errors import EnvironmentProblem, OutputError
from ..utils.machine.spark import describe_error
from ..utils.variables import read
from .hadoop import Hadoop

_HEAP = "256m"


@contextmanager
def local_folder() -> Iterator[Path]:
    """A temporary folder on the disk that Spark was given, which removes what a killed worker leaves there."""
    folder = read("SPARK_LOCAL_DIRS").split(",")[0]
    with tempfile.TemporaryDirectory(prefix="ppldm-", dir=folder if os.path.isdir(folder) else None) as place:
        yield Path(place)


@contextmanager
def reaching(settings: str) -> Iterator[Hadoop]:
    """The file systems under `Hadoop.settings` of the driver; what Java raises in the block comes out as one line.

    Raises EnvironmentProblem, OutputError.
    """
    from py4j.protocol import Py4JError

    try:
        yield connect(settings)
    except Py4JError as error:
        raise OutputError(f"an executor's file system failed: {describe_error(error)}") from error


@lru_cache(maxsize=1)
def connect(settings: str) -> Hadoop:
    """The gateway of this process. Raises EnvironmentProblem."""
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
    from py4j.protocol import Py4JError

    user = read("HADOOP_USER_NAME") or read("SPARK_USER")
    options = [f"-Xmx{_HEAP}", *([f"-DHADOOP_USER_NAME={user}"] if user else [])]
    jars, classpath = _find_classes()
    try:
        port, token = launch_gateway(
            jarpath=next(map(str, jars.glob("py4j-*.jar")), ""),
            classpath=classpath,
            javaopts=options,
            java_path=None,
            die_on_exit=True,
            enable_auth=True,
        )
        jvm = JavaGateway(gateway_parameters=GatewayParameters(port=port, auth_token=token)).jvm
        conf = jvm.org.apache.hadoop.conf.Configuration()
        conf.addResource(jvm.java.io.ByteArrayInputStream(bytearray(settings.encode())))
        conf.size()  # reads the stream
    except (OSError, ValueError, TypeError, Py4JError) as error:
        raise EnvironmentProblem(
            f"an executor cannot start Java with the classes of {jars} ({error}); set SPARK_HOME and JAVA_HOME there"
        ) from error
    return Hadoop(jvm, conf)


def _find_classes() -> tuple[Path, str]:
    """(folder of Spark's jars, class path): those jars, what a container of YARN has, and what `--jars` brought."""
    import pyspark
    from pyspark import SparkFiles

    homes = (Path(read("SPARK_HOME", "."), "jars"), Path(pyspark.__file__).parent / "jars", Path("__spark_libs__"))
    jars = next((home.absolute() for home in homes if home.is_dir()), homes[0])
    places = (read("CLASSPATH"), f"{jars}/*", f"{SparkFiles.getRootDirectory()}/*")
    return jars, ":".join(place for place in places if place)
