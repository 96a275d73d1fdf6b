"""A place that a flag names: a path of this machine, or one at an address that Hadoop's file systems know.

hdfs://, s3a:// and all else that Spark is set up for are reached through a gateway to Java; `file:` addresses too, by
the raw file system, which knows no files of checksums. Names, sizes, small files and the rows of metadata go through
the gateway; pictures never do: Java copies their files. The driver has Spark's own gateway (`Hadoop.of`). An executor's
Python starts one for each worker: a process of the classes that Spark has there, under the settings of the driver.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from uuid import uuid4

from ..utils.errors import DataError, EnvironmentProblem, OutputError, PpldmError
from ..utils.files import RemotePath, local_path, read_json, write_json
from ..utils.finished import Piece, take_fingerprint
from ..utils.machine.spark import describe_error
from ..utils.text import as_json
from ..utils.variables import read

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://([^/]*))?(/.*)?")
_READ_BYTES = 1 << 20
_HEAP = "256m"


def is_address(path) -> bool:
    """Whether a flag's value is an address, such as hdfs://name/folder, and no path."""
    return "://" in str(path)


def is_remote(name) -> bool:
    """Whether a flag's value is an address of another file system than this machine's."""
    return is_address(name) and not str(name).lower().startswith("file:")


def address_of(name: str) -> str:
    """The address that a flag names; of a path, that of this machine."""
    return str(name) if is_remote(name) else f"file://{os.path.abspath(local_path(name))}"


def split_address(address: str) -> tuple[str, str]:
    """(host, path) of an address; `file:` has no host."""
    found = _ADDRESS.fullmatch(address)
    return (found.group(2) or "", found.group(3) or "/") if found else ("", address)


def path_of(name: str, spark) -> Path | AddressPath:
    """The path that a flag names: an address, which needs a Spark session, or one here. Raises ConfigError."""
    if spark is None or not is_address(name):
        return local_path(name)
    return AddressPath(address_of(name).rstrip("/"), Hadoop.of(spark))


def natural_key(path) -> list:
    """Sorts names with numbers by the numbers: part_2 before part_10."""
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", str(path))]


class Hadoop:
    """The file systems that a `Configuration` of Hadoop knows, by the gateway of this process. Errors of Java come out
    as they are: `spark.spark_session` makes one line of them, on an executor `reaching`."""

    def __init__(self, jvm, conf):
        self.jvm, self.conf = jvm, conf

    @classmethod
    def of(cls, spark) -> Hadoop:
        return cls(spark.sparkContext._jvm, spark.sparkContext._jsc.hadoopConfiguration())

    def settings(self) -> str:
        """The configuration as Hadoop's XML, secrets included, to go where Spark's own goes: to the executors."""
        text = self.jvm.java.io.StringWriter()
        self.conf.writeXml(text)
        return text.toString()


@dataclass(frozen=True)
class Entry:
    """What is at an address. `time_ms`: of its last change, since 1970."""

    path: AddressPath
    is_dir: bool
    st_size: int
    time_ms: int


@dataclass(frozen=True, order=True)
class AddressPath(RemotePath):
    """`address` has no slash at its end. Laws. Methods that `pathlib.Path` has do what its do. What is written is
    finished or absent, by a temporary name and a rename. A pickled path has lost its gateway, which belongs to one
    process; `at` gives it that of another."""

    address: str
    hadoop: Hadoop | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.address

    def __reduce__(self):
        return type(self), (self.address,)

    def __truediv__(self, name: str) -> AddressPath:
        return replace(self, address=f"{self.address}/{name}") if str(name) else self

    def at(self, hadoop: Hadoop) -> AddressPath:
        return replace(self, hadoop=hadoop)

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> AddressPath:
        return replace(self, address=self.address.rpartition("/")[0])

    def absolute(self) -> AddressPath:
        return self

    def exists(self) -> bool:
        system, path = self._in_java()
        return system.exists(path)

    def stat(self) -> Entry:
        system, path = self._in_java()
        if not system.exists(path):
            raise FileNotFoundError(f"{self} is not there")
        return _entry_of(self, system.getFileStatus(path))

    def is_dir(self) -> bool:
        return self.exists() and self.stat().is_dir

    def is_file(self) -> bool:
        return self.exists() and not self.stat().is_dir

    def list(self, pattern: str = "*") -> list[Entry]:
        """The entries of a folder that fit the pattern, or the file itself, by the numbers in their names."""
        system, path = self._in_java()
        if not system.exists(path):
            return []
        found = system.listStatus(path, self.hadoop.jvm.org.apache.hadoop.fs.GlobFilter(pattern))
        # Java has other spellings of an address; the file itself lies as deep as it is asked for.
        own = (self / one.getPath().getName() if one.getPath().depth() > path.depth() else self for one in found)
        entries = map(_entry_of, own, found)
        return sorted(entries, key=lambda entry: (natural_key(entry.path.name), entry.path.name))

    def glob(self, pattern: str) -> Iterator[AddressPath]:
        """What fits the pattern in this folder, in the order of the numbers in names."""
        return (entry.path for entry in self.list(pattern)) if self.is_dir() else iter(())

    def count_bytes(self) -> int:
        """Of a file, or of all files of a folder without folders."""
        return sum(entry.st_size for entry in self.list())

    def count_free_bytes(self) -> int:
        """What may still be written to the file system of a folder that is there, copies that it makes counted."""
        system, path = self._in_java()
        return system.getStatus(path).getRemaining() // max(1, system.getDefaultReplication(path))

    def checksum(self) -> str | None:
        """The file system's own checksum of a file's content, as HDFS keeps it; None where it keeps none."""
        system, path = self._in_java()
        found = system.getFileChecksum(path)
        return found and found.toString()

    def open(self, mode: str = "rb") -> io.BufferedReader:
        num_bytes = self.stat().st_size
        system, path = self._in_java()
        return io.BufferedReader(_Stream(system.open(path), num_bytes), _READ_BYTES)

    def read_text(self, encoding: str = "utf-8") -> str:
        with self.open() as file:
            return file.read().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        system, path = self._in_java()
        temporary = path.suffix(".tmp")
        stream = system.create(temporary, True)
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()
        system.delete(path, False)
        replace(self, address=temporary.toString()).rename(self)

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        system, path = self._in_java()
        system.mkdirs(path)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok:
            self.stat()
        self.remove()

    def remove(self) -> None:
        """Remove a file, or a folder with all that is in it; nothing where it is absent."""
        system, path = self._in_java()
        system.delete(path, True)

    def rename(self, target: AddressPath) -> None:
        """Nothing may be at the target. Raises OutputError."""
        system, path = self._in_java()
        if not system.rename(path, target._in_java()[1]):
            raise OutputError(f"cannot rename {self} to {target}; see whether another run has made it")

    def fetch(self, path: Path) -> None:
        """Copy a file to a path of this machine."""
        system, source = self._in_java()
        system.copyToLocalFile(False, source, self.hadoop.jvm.org.apache.hadoop.fs.Path(f"file://{path}"), True)

    def put(self, path: Path) -> None:
        """Copy a file or folder of this machine here, where nothing is."""
        system, target = self._in_java()
        system.copyFromLocalFile(False, True, self.hadoop.jvm.org.apache.hadoop.fs.Path(f"file://{path}"), target)

    def _in_java(self) -> tuple:
        """(its file system, the path there)."""
        host, _ = split_address(self.address)
        # A host or bucket without a slash would be taken for a folder of the user's.
        text = f"{self}/" if host and self.address.endswith(f"//{host}") else self.address
        path = self.hadoop.jvm.org.apache.hadoop.fs.Path(text)
        system = path.getFileSystem(self.hadoop.conf)
        return (system.getRawFileSystem() if system.getScheme() == "file" else system), path


def _entry_of(path: AddressPath, status) -> Entry:
    return Entry(path, status.isDirectory(), status.getLen(), status.getModificationTime())


class _Stream(io.RawIOBase):
    """A file that Java has open."""

    def __init__(self, stream, num_bytes: int):
        self._stream, self._num_bytes, self._place = stream, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._num_bytes}[whence]
        return self._place

    def readinto(self, buffer) -> int:
        self._stream.seek(min(self._place, self._num_bytes))
        data = self._stream.readNBytes(len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def parquet_source(path: Path | RemotePath):
    """A parquet file as pyarrow's readers take it."""
    return path.open("rb") if isinstance(path, RemotePath) else path


def fingerprint_of(paths: Sequence[Path | AddressPath], earlier: Mapping | None = None) -> dict[str, str]:
    """`jobs.take_fingerprint` of whole files; at addresses by the file system's checksums, else sizes and times."""
    if not any(isinstance(path, AddressPath) for path in paths):
        return take_fingerprint([Piece(path, path.name) for path in paths], earlier)
    entries = [path.stat() for path in paths]
    facts = [[entry.path.name, entry.st_size, entry.path.checksum() or entry.time_ms] for entry in entries]
    digest = sha256(json.dumps(facts).encode()).hexdigest()
    return {"state": digest, "content": digest}


def is_vacant(path: Path | AddressPath) -> bool:
    """Whether nothing is there, or an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.glob("*")))


@contextmanager
def claimed_at(address: AddressPath, plan: Mapping, replace: bool) -> Iterator[AddressPath]:
    """`files.claimed_dir` at an address, where there are no locks, so that only one run may write there."""
    unfinished = address.parent / f".{address.name}.unfinished"
    plan_path = unfinished / ".plan.json"
    if read_json(plan_path) != as_json(plan):
        unfinished.remove()
        unfinished.mkdir()
        write_json(plan_path, plan)
    try:
        yield unfinished
    except DataError:
        unfinished.remove()
        raise
    if not replace and not is_vacant(address):
        raise OutputError(f"another process has just finished {address}; run the same command again")
    plan_path.remove()
    address.remove()
    unfinished.rename(address)


def put_files(files: Mapping[Path, AddressPath], replaced: Iterable[AddressPath], work: AddressPath) -> None:
    """Copy files and folders of this machine, all of other names, to addresses of one folder, in place of `replaced`:
    to a temporary folder in `work` first, then renamed in their order; the last one is there when all are."""
    staging = work / f".{uuid4().hex}.tmp"
    staging.mkdir()
    try:
        for path in files:
            (staging / path.name).put(path)
        for path in replaced:
            path.remove()
        for path, target in files.items():
            target.parent.mkdir()
            (staging / path.name).rename(target)
    finally:
        staging.remove()


@contextmanager
def local_folder(shown: Path | AddressPath) -> Iterator[Path]:
    """A temporary folder on the disk that Spark was given. Errors of the block name `shown` in its place."""
    given = read("SPARK_LOCAL_DIRS").split(",")[0]
    with tempfile.TemporaryDirectory(prefix="ppldm-", dir=given if os.path.isdir(given) else None) as folder:
        try:
            yield Path(folder)
        except PpldmError as error:
            raise type(error)(str(error).replace(folder, str(shown))) from error


@contextmanager
def reaching(settings: str) -> Iterator[Hadoop]:
    """The file systems under `Hadoop.settings`; errors of Java are OutputErrors. Raises EnvironmentProblem."""
    from py4j.protocol import Py4JError

    try:
        yield connect(settings)
    except Py4JError as error:
        raise OutputError(f"an executor's file system failed: {describe_error(error)}") from error


@lru_cache(maxsize=1)
def connect(settings: str) -> Hadoop:
    import pyspark
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
    from py4j.protocol import Py4JError

    user = read("HADOOP_USER_NAME") or read("SPARK_USER")
    options = [f"-Xmx{_HEAP}", *([f"-DHADOOP_USER_NAME={user}"] if user else [])]
    homes = (Path(read("SPARK_HOME", "."), "jars"), Path(pyspark.__file__).parent / "jars", Path("__spark_libs__"))
    jars = next((home.absolute() for home in homes if home.is_dir()), homes[0])
    # Spark's own jars, what a container of YARN has, and what `--jars` brought.
    classes = (read("CLASSPATH"), f"{jars}/*", f"{pyspark.SparkFiles.getRootDirectory()}/*")
    ours = {"jarpath": next(map(str, jars.glob("py4j-*.jar")), ""), "javaopts": options}
    ours["classpath"] = ":".join(one for one in classes if one)
    try:
        port, token = launch_gateway(**ours, java_path=None, die_on_exit=True, enable_auth=True)
        jvm = JavaGateway(gateway_parameters=GatewayParameters(port=port, auth_token=token)).jvm
        conf = jvm.org.apache.hadoop.conf.Configuration()
        conf.addResource(jvm.java.io.ByteArrayInputStream(bytearray(settings.encode())))
        conf.size()  # reads the stream
    except (OSError, ValueError, TypeError, Py4JError) as error:
        raise EnvironmentProblem(
            f"an executor cannot start Java with the classes of {jars} ({error}); set SPARK_HOME and JAVA_HOME there"
        ) from error
    return Hadoop(jvm, conf)
