"""A path at an address, for code that works with `pathlib.Path`: as many of its methods as that code asks for.

Law: on a tree of files, each method says and does what that of `pathlib.Path` does. What is written is finished or
absent, by a temporary name and a rename. A pickled path has lost its gateway, which belongs to one process; `at` gives
it that of another.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from ..utils.files import RemotePath, local_path
from .hadoop import Hadoop, address_of, is_address


@dataclass(frozen=True, order=True)
class AddressPath(RemotePath):
    """`address` has no slash at its end."""

    address: str
    hadoop: Hadoop | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.address

    def __reduce__(self):
        return AddressPath, (self.address,)

    def __truediv__(self, name: str) -> AddressPath:
        return replace(self, address=f"{self.address}/{name}") if str(name) else self

    def at(self, hadoop: Hadoop) -> AddressPath:
        """The same place through another gateway."""
        return replace(self, hadoop=hadoop)

    @property
    def name(self) -> str:
        """As pathlib's."""
        return self.address.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """As pathlib's."""
        stem, dot, suffix = self.name.rpartition(".")
        return stem if stem and suffix else self.name

    @property
    def parent(self) -> AddressPath:
        """As pathlib's, below the root."""
        return replace(self, address=self.address.rpartition("/")[0])

    def absolute(self) -> AddressPath:
        """As pathlib's."""
        return self

    def exists(self) -> bool:
        """As pathlib's."""
        return self.hadoop.exists(self.address)

    def is_dir(self) -> bool:
        """As pathlib's."""
        entry = self.hadoop.find(self.address)
        return bool(entry and entry.is_dir)

    def glob(self, pattern: str) -> Iterator[AddressPath]:
        """As pathlib's, of one folder, in the order of the numbers in names."""
        return (self / entry.name for entry in self.hadoop.list(self.address, pattern)) if self.is_dir() else iter(())

    def count_bytes(self) -> int:
        """Of a file, or of all files of a folder without folders."""
        return sum(entry.bytes for entry in self.hadoop.list(self.address))

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """For reading bytes. Raises FileNotFoundError."""
        return self.hadoop.open(self.address)

    def read_text(self, encoding: str = "utf-8") -> str:
        """As pathlib's."""
        with self.open() as file:
            return file.read().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """A small file, finished or absent."""
        self.hadoop.write_bytes(self.address, data)

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """With those above it; one that is there stays."""
        self.hadoop.make_dir(self.address)

    def unlink(self, missing_ok: bool = False) -> None:
        """As pathlib's."""
        if not missing_ok and not self.exists():
            raise FileNotFoundError(f"{self} is not there")
        self.hadoop.delete(self.address)

    def rename(self, target: AddressPath) -> None:
        """Nothing may be at the target. Raises OutputError."""
        self.hadoop.rename(self.address, target.address)

    def remove(self) -> None:
        """A file or a folder with all that is in it; nothing where it is absent."""
        self.hadoop.delete(self.address)

    def count_free_bytes(self) -> int:
        """As `files.count_free_bytes`."""
        return self.hadoop.count_free_bytes(self.address)


def put_files(files: Mapping[Path, AddressPath], replaced: Iterable[AddressPath], work: AddressPath) -> None:
    """Copy files and folders of this machine, all of other names, to addresses of one folder, in place of `replaced`.

    They go to a temporary folder in the folder `work` first, and are then renamed in their order; the last one is there
    when all are.
    """
    staging = work / f".{uuid4().hex}.tmp"
    staging.mkdir()
    try:
        for path in files:
            staging.hadoop.put(path, (staging / path.name).address)
        for path in replaced:
            path.remove()
        for path, target in files.items():
            target.parent.mkdir()
            (staging / path.name).rename(target)
    finally:
        staging.remove()


def path_of(name: str, spark):
    """The path that a flag names: an address where there is a Spark session to reach it by, else one of this machine.

    Raises ConfigError for an address without a session.
    """
    if spark is None or not is_address(name):
        return local_path(name)
    return AddressPath(address_of(name).rstrip("/"), Hadoop.of(spark))
