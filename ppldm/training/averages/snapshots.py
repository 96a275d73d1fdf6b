"""Snapshots of the averages of `--ema_posthoc`, from which `ppldm ema` makes others (averages/make.py).

RUN/ema_snapshots/0.05-1000.safetensors is the average of relative standard deviation 0.05 after update 1000: arrays by
the names of the parameters; beside them `num_updates`, those that the average has taken in (not those that were
skipped), and `crc32` of the arrays. A file is finished or absent. Those later than the update that a run goes on from
are removed, and made again with the same bits."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...networks.ema import ExponentialMovingAverage
from ...utils.checksums import checksum_arrays
from ...utils.errors import DiskFullError, ModelError
from ...utils.files import atomic_write, count_free_bytes, make_output_dir, passing_over, remove_leftovers
from ...utils.log import get_logger
from ...weights.formats.files import read_arrays, read_metadata
from ..checkpoint import room_for
from ..run_folder import SNAPSHOTS

DEFAULT_NUMBER = 50  # of times in a run
_FACTS = "average"
_NAME = re.compile(r"(\d.*)-(\d+)\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """One file: an average after update `step`, the `num_updates`-th that was not skipped."""

    path: Path
    std: float
    step: int
    num_updates: int

    def read(self) -> dict[str, np.ndarray]:
        """The average by parameter, float16 or float32. Raises ModelError for a file that has changed."""
        arrays = read_arrays(self.path)
        if checksum_arrays(arrays.items()) != _facts(self.path).get("crc32"):
            raise ModelError(f"{self.path} has changed or is cut short; remove it, and others take its place")
        return arrays


@dataclass(frozen=True)
class SnapshotWriter:
    """Writes a run's snapshots, on its main process. averages: by standard deviation; every: updates."""

    folder: Path  # the run's
    averages: dict[float, ExponentialMovingAverage]
    every: int
    dtype: str

    def announce(self, start_step: int, max_steps: int) -> None:
        """Say what a run will keep, and warn where the disk has no room for it."""
        numbers = sum(p.size for average in self.averages.values() for p in average.parameters.values())
        times = -(-max_steps // self.every) - start_step // self.every
        size = numbers * np.dtype(self.dtype).itemsize * times / 1e9
        text = "snapshots of averages every %d updates in %s: %.3f GB until update %d"
        get_logger().info(text, self.every, self.folder / SNAPSHOTS, size, max_steps)
        free = count_free_bytes(self.folder) / 1e9
        if free < size:
            get_logger().warning("%s has %.3f GB free; raise --ema_posthoc_every, or free some", self.folder, free)

    def are_due(self, step: int, max_steps: int) -> bool:
        """Whether to write after update `step`: every so many, and after the last one."""
        return step % self.every == 0 or step == max_steps

    def write(self, step: int) -> None:
        """Write the averages after update `step`. A disk that is full is warned of, and training goes on."""
        folder = make_output_dir(self.folder / SNAPSHOTS)
        for std, average in self.averages.items():
            if average.num_updates:
                path = folder / f"{std:g}-{step}.safetensors"
                try:
                    write_snapshot(path, average, self.dtype)
                except DiskFullError as error:
                    get_logger().warning("training goes on without a snapshot: %s", error)


def write_snapshot(path: Path, average: ExponentialMovingAverage, dtype: str) -> None:
    """Write one file, array by array, since memory may not hold a second copy of the average. Raises DiskFullError."""
    entries, crc32, end = {}, 0, 0
    for name, array in _cast(average, dtype):
        start, end = end, end + array.nbytes
        kind = "F16" if array.dtype == np.float16 else "F32"
        entries[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, end]}
        crc32 = int(checksum_arrays([(name, array)], crc32), 16)
    facts = {"num_updates": average.num_updates, "crc32": f"{crc32:08x}"}
    header = json.dumps({"__metadata__": {_FACTS: json.dumps(facts)}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    with room_for(path, 8 + len(header) + end), atomic_write(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, array in _cast(average, dtype):
            file.write(array.tobytes())


def _cast(average: ExponentialMovingAverage, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Averages by name, in its order. What float16 cannot hold, numbers above 65504, makes an array stay float32."""
    for name, tensor in sorted(average.shadow.items()):
        array = tensor.numpy()
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        yield name, cast if np.isfinite(cast).all() else array


def list_snapshots(run) -> list[Snapshot]:
    """Those in the folder of a run, by step and standard deviation. Raises ModelError for a damaged one."""
    files = [(path, match, _facts(path).get("num_updates", 0)) for path, match in _files(run)]
    found = [Snapshot(path, float(match[1]), int(match[2]), count) for path, match, count in files]
    return sorted(found, key=lambda one: (one.step, one.std))


def remove_later(run, step: int) -> None:
    """Remove the snapshots after update `step` and unfinished ones. For the process that holds the folder."""
    remove_leftovers(Path(run, SNAPSHOTS))
    later = [path for path, match in _files(run) if int(match[2]) > step]
    for path in later:
        with passing_over(path):
            path.unlink()
    if later:
        get_logger().info("removed %d snapshots of averages after update %d, to be made again", len(later), step)


def _facts(path: Path) -> dict:
    return json.loads(read_metadata(path).get(_FACTS, "{}"))


def _files(run) -> list[tuple[Path, re.Match]]:
    paths = Path(run, SNAPSHOTS).glob("*.safetensors")
    return [(path, match) for path in paths if (match := _NAME.fullmatch(path.name))]
