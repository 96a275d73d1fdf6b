"""Paths at addresses as plain Python on this machine's files: for laws of what stands on them, without Java. The tests
of paths at addresses run over both, so that it does what Hadoop does."""

import fnmatch
import shutil
from dataclasses import dataclass
from pathlib import Path

from ppldm.prepare.place import AddressPath, Entry, natural_key
from ppldm.utils.errors import OutputError


@dataclass
class HadoopHere:
    """In place of the gateway: fails at the step (a copy or rename) of number `steps`, where it is given."""

    steps: int | None = None

    def step(self) -> None:
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                raise OutputError("the network is gone")


class PathHere(AddressPath):
    @property
    def path(self) -> Path:
        return Path(self.address.removeprefix("file://"))

    def exists(self):
        return self.path.exists()

    def stat(self):
        status = self.path.stat()
        return Entry(self, self.path.is_dir(), status.st_size, status.st_mtime_ns // 10**6)

    def list(self, pattern="*"):
        paths = self.path.iterdir() if self.path.is_dir() else [self.path] if self.path.exists() else []
        found = [at(one, self.hadoop).stat() for one in paths if fnmatch.fnmatchcase(one.name, pattern)]
        return sorted(found, key=lambda entry: (natural_key(entry.path.name), entry.path.name))

    def count_free_bytes(self):
        return shutil.disk_usage(self.path).free

    def checksum(self):
        return None

    def mkdir(self, parents=True, exist_ok=True):
        self.path.mkdir(parents=True, exist_ok=True)

    def remove(self):
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)

    def rename(self, target):
        self.hadoop.step()
        if target.exists():
            raise OutputError(f"cannot rename {self} to {target}")
        self.path.rename(target.path)

    def fetch(self, path):
        shutil.copyfile(self.path, path)

    def put(self, path):
        self.hadoop.step()
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, self.path)

    def open(self, mode="rb"):
        return open(self.path, mode)

    def write_bytes(self, data):
        self.path.write_bytes(data)


def at(path: Path, hadoop: HadoopHere | None = None) -> PathHere:
    """The address of a path of this machine."""
    return PathHere(f"file://{path}", hadoop or HadoopHere())
