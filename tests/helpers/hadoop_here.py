"""Hadoop's file systems as plain Python on this machine's files: for laws of what stands on them, without Java. The
tests of paths at addresses run over both, so that it does what Hadoop does."""

import fnmatch
import shutil
from pathlib import Path

from ppldm.prepare.hadoop import Entry, Hadoop
from ppldm.prepare.metadata import natural_key
from ppldm.utils.errors import OutputError


def path_at(address: str) -> Path:
    return Path(address.removeprefix("file://"))


class HadoopHere(Hadoop):
    """Fails at the step (a copy or rename) of number `steps`, where it is given."""

    def __init__(self, steps: int | None = None):
        self.steps = steps

    def step(self) -> None:
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                raise OutputError("the network is gone")

    def exists(self, address):
        return path_at(address).exists()

    def find(self, address):
        path = path_at(address)
        if not path.exists():
            return None
        status = path.stat()
        return Entry(address, path.name, path.is_dir(), status.st_size, status.st_mtime_ns // 10**6)

    def list(self, address, pattern="*"):
        path = path_at(address)
        paths = path.iterdir() if path.is_dir() else [path] if path.exists() else []
        found = [self.find(f"file://{one}") for one in paths if fnmatch.fnmatchcase(one.name, pattern)]
        return sorted(found, key=lambda entry: (natural_key(entry.name), entry.name))

    def count_free_bytes(self, address):
        return shutil.disk_usage(path_at(address)).free

    def checksum(self, address):
        return None

    def make_dir(self, address):
        path_at(address).mkdir(parents=True, exist_ok=True)

    def delete(self, address):
        path = path_at(address)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def rename(self, old, new):
        self.step()
        if path_at(new).exists():
            raise OutputError(f"cannot rename {old} to {new}")
        path_at(old).rename(path_at(new))

    def fetch(self, address, path):
        shutil.copyfile(path_at(address), path)

    def put(self, path, address):
        self.step()
        (shutil.copytree if Path(path).is_dir() else shutil.copyfile)(path, path_at(address))

    def open(self, address):
        return open(path_at(address), "rb")

    def write_bytes(self, address, data):
        path_at(address).write_bytes(data)
