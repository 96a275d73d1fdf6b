"""Files by Hadoop's file system API, through a gateway to Java: hdfs://, s3a:// and all else that Spark is set up for.

Names, sizes, small files and the rows of metadata go through the gateway; pictures never do: Java copies their files.
`file:` addresses work as well, by the raw file system, which knows no files of checksums. The driver has Spark's own
gateway (`Hadoop.of`); an executor has none, and starts one (`executor_hadoop`).
"""

import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from ..utils.errors import ConfigError, DataError, OutputError
from ..utils.files import local_path
from ..utils.machine.spark import escape_glob
from .filter.columns import INTEGER, NUMBER, OTHER, TEXT, TRUTH, Columns, check_names
from .metadata import Table, Tables, natural_key

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://([^/]*))?(/.*)?")
_READ_BYTES = 1 << 20
_KINDS = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), INTEGER),
    **dict.fromkeys(("float", "double"), NUMBER),
    **{"string": TEXT, "boolean": TRUTH},
}


class Session(Protocol):
    """What is used of a SparkSession."""

    sparkContext: object


@dataclass(frozen=True)
class Entry:
    """A file or folder, by its full address. `time_ms`: of its last change, since 1970."""

    address: str
    name: str
    is_dir: bool
    bytes: int
    time_ms: int


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


class Hadoop:
    """The file systems that a `Configuration` of Hadoop knows. Errors of Java come out as they are: on the driver,
    `spark.spark_session` makes one line of them."""

    def __init__(self, jvm, conf):
        self._jvm, self._conf = jvm, conf

    @classmethod
    def of(cls, spark: Session) -> "Hadoop":
        """Of a session, on the driver."""
        return cls(spark.sparkContext._jvm, spark.sparkContext._jsc.hadoopConfiguration())

    def settings(self) -> str:
        """The configuration as Hadoop's XML, secrets included, to go where Spark's own goes: to the executors."""
        text = self._jvm.java.io.StringWriter()
        self._conf.writeXml(text)
        return text.toString()

    def _find(self, address: str):
        host, path = split_address(address)
        # A host or bucket without a slash would be taken for a folder of the user's.
        path = self._jvm.org.apache.hadoop.fs.Path(f"{address}/" if host and address.endswith(f"//{host}") else address)
        system = path.getFileSystem(self._conf)
        return (system.getRawFileSystem() if system.getScheme() == "file" else system), path

    def exists(self, address: str) -> bool:
        """Whether a file or folder is there."""
        system, path = self._find(address)
        return system.exists(path)

    def find(self, address: str) -> Entry | None:
        """What is there; None for nothing."""
        system, path = self._find(address)
        return _entry_of(system.getFileStatus(path)) if system.exists(path) else None

    def list(self, address: str, pattern: str = "*") -> list[Entry]:
        """The entries of a folder whose names fit the pattern, or the file itself, in the order of the numbers in their
        names; [] where there is nothing."""
        system, path = self._find(address)
        if not system.exists(path):
            return []
        found = system.listStatus(path, self._jvm.org.apache.hadoop.fs.GlobFilter(pattern))
        return sorted(map(_entry_of, found), key=lambda entry: (natural_key(entry.name), entry.name))

    def count_free_bytes(self, address: str) -> int:
        """What may still be written to the file system of a folder that is there, copies that it makes counted."""
        system, path = self._find(address)
        return system.getStatus(path).getRemaining() // max(1, system.getDefaultReplication(path))

    def checksum(self, address: str) -> str | None:
        """The file system's own checksum of a file's content, as HDFS keeps it; None where it keeps none."""
        system, path = self._find(address)
        found = system.getFileChecksum(path)
        return found and found.toString()

    def make_dir(self, address: str) -> None:
        """Make a folder and those above it."""
        system, path = self._find(address)
        system.mkdirs(path)

    def delete(self, address: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        system, path = self._find(address)
        system.delete(path, True)

    def rename(self, old: str, new: str) -> None:
        """Raises OutputError."""
        system, path = self._find(old)
        if not system.rename(path, self._find(new)[1]):
            raise OutputError(f"cannot rename {old} to {new}; see whether another run has made it")

    def fetch(self, address: str, path: str) -> None:
        """Copy a file to a path of this machine."""
        system, source = self._find(address)
        system.copyToLocalFile(False, source, self._jvm.org.apache.hadoop.fs.Path(f"file://{path}"), True)

    def put(self, path, address: str) -> None:
        """Copy a file or folder of this machine to an address where nothing is."""
        system, target = self._find(address)
        system.copyFromLocalFile(False, True, self._jvm.org.apache.hadoop.fs.Path(f"file://{path}"), target)

    def open(self, address: str) -> io.BufferedReader:
        """A file for reading. Raises FileNotFoundError."""
        system, path = self._find(address)
        if not system.exists(path):
            raise FileNotFoundError(f"{address} is not there")
        return io.BufferedReader(_Stream(system.open(path), system.getFileStatus(path).getLen()), _READ_BYTES)

    def read_json(self, address: str):
        """As `files.read_json`."""
        try:
            with self.open(address) as file:
                return json.loads(file.read())
        except (FileNotFoundError, ValueError):
            return None

    def write_bytes(self, address: str, data: bytes) -> None:
        """Write a small file under a temporary name and rename it."""
        system, path = self._find(address)
        temporary = path.suffix(".tmp")
        stream = system.create(temporary, True)
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()
        system.delete(path, False)
        self.rename(temporary.toString(), address)

    def write_json(self, address: str, value) -> None:
        """As `files.write_json`."""
        self.write_bytes(address, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())

    def read_footer(self, address: str) -> tuple[int, tuple[tuple[str, str], ...]]:
        """(rows, name and type of each column as parquet has them) of a parquet file."""
        path = self._jvm.org.apache.hadoop.fs.Path(address)
        file = self._jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(path, self._conf)
        reader = self._jvm.org.apache.parquet.hadoop.ParquetFileReader.open(file)
        try:
            fields = reader.getFooter().getFileMetaData().getSchema().getFields()
            return reader.getRecordCount(), tuple((field.getName(), field.toString()) for field in fields)
        finally:
            reader.close()


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


def _entry_of(status) -> Entry:
    path = status.getPath()
    return Entry(path.toString(), path.getName(), status.isDirectory(), status.getLen(), status.getModificationTime())


def read_tables_at(spark, inputs: list[str]) -> Tables:
    """As `metadata.read_tables`, of addresses, paths being those of this machine. Raises ConfigError, DataError."""
    hadoop, entries = Hadoop.of(spark), []
    for name in inputs:
        found = [one for one in hadoop.list(name) if not one.is_dir and not one.name.startswith((".", "_"))]
        if len(found) != 1 or found[0].name != name.rpartition("/")[2]:
            found = [one for one in found if one.name.endswith(".parquet")]
        if not found:
            raise ConfigError(f"--input {name} has no *.parquet files, or is not there; name the folder of them")
        entries += found
    if len({one.address for one in entries}) < len(entries):
        raise ConfigError("--input names a file twice; name it once")
    files = []
    for one in entries:
        rows, schema = hadoop.read_footer(one.address)
        files.append(Table(one.address, rows, one.bytes, schema))
        if set(schema) != set(files[0].schema):
            name = min(set(schema) ^ set(files[0].schema))[0]
            raise ConfigError(
                f"column {name!r} is not the same in {files[0].path} and {one.address}; filter them one by one"
            )
    check_names((name for name, _ in files[0].schema), files[0].path)
    fields = spark.read.parquet(escape_glob(files[0].path)).schema.fields
    kinds = {field.name: field.dataType.simpleString() for field in fields}
    columns = {name: NUMBER if kind.startswith("decimal") else _KINDS.get(kind, OTHER) for name, kind in kinds.items()}
    return Tables(tuple(files), Columns(columns), tuple(inputs))


def fingerprint_at(hadoop: Hadoop, addresses: Iterable[str]) -> dict[str, str]:
    """As `jobs.take_fingerprint`. Content is what the file system's own checksums say, as HDFS keeps them, and
    elsewhere sizes and times: nothing is read for it."""
    facts = []
    for address in addresses:
        entry = hadoop.find(address)
        facts.append([entry.name, entry.bytes, hadoop.checksum(address) or entry.time_ms])
    digest = sha256(json.dumps(facts).encode()).hexdigest()
    return {"state": digest, "content": digest}


@dataclass(frozen=True)
class AddressPlace:
    """A folder of results at an address: what `filter` asks of the place that it writes to."""

    hadoop: Hadoop
    address: str

    def read_manifest(self) -> dict | None:
        """None where there is none, or it is damaged."""
        return self.hadoop.read_json(f"{self.address}/manifest.json")

    def is_vacant(self) -> bool:
        """Whether nothing is there, or an empty folder."""
        return not self.hadoop.list(self.address)

    def list_parts(self, num_parts: int) -> list[dict]:
        """Path, rows and bytes of the parts that are there."""
        found = {entry.name: entry for entry in self.hadoop.list(self.address)}
        names = [f"part_{number}.parquet" for number in range(1, num_parts + 1)]
        return [
            {"path": name, "rows": self.hadoop.read_footer(found[name].address)[0], "bytes": found[name].bytes}
            for name in names
            if name in found
        ]

    def write_manifest(self, manifest: dict) -> None:
        """The last file."""
        self.hadoop.write_json(f"{self.address}/manifest.json", manifest)

    @contextmanager
    def claimed(self, plan: dict, replace: bool) -> Iterator["AddressPlace"]:
        """As `files.claimed_dir`; there are no locks at an address, so that only one run may write there."""
        parent, _, name = self.address.rpartition("/")
        unfinished = AddressPlace(self.hadoop, f"{parent}/.{name}.unfinished")
        plan_address = f"{unfinished.address}/.plan.json"
        if self.hadoop.read_json(plan_address) != json.loads(json.dumps(plan)):
            self.hadoop.delete(unfinished.address)
            self.hadoop.make_dir(unfinished.address)
            self.hadoop.write_json(plan_address, plan)
        try:
            yield unfinished
        except DataError:
            self.hadoop.delete(unfinished.address)
            raise
        if not replace and not self.is_vacant():
            raise OutputError(f"another process has just finished {self.address}; run the same command again")
        self.hadoop.delete(plan_address)
        self.hadoop.delete(self.address)
        self.hadoop.rename(unfinished.address, self.address)
