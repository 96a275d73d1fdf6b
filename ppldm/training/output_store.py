"""The output folder of a run in a store: a folder of this machine, and its copy at the store's address.

After each checkpoint a thread brings the copy up to date: files of new checkpoints, each with its manifest last, by
which it is there or not; away with the manifests, then the files, of those that were removed here; then whatever else
has changed. Where that fails there is a warning, and the next checkpoint tries again; with the last one of a run it is
an error. A start on another machine finds the newest checkpoint of the copy that verifies."""

import fcntl
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..utils.checksums import hash_file
from ..utils.errors import ConfigError, OutputError, StoreError
from ..utils.files import atomic_dir, check_address, finish_file, shown
from ..utils.log import get_logger
from ..utils.processes.ranks import SIGNS_DIR
from ..utils.store import client
from ..weights.folders import is_checkpoint_name, list_checkpoints, step_of
from .checkpoint import MANIFEST, verify
from .run_folder import LAUNCH_LOGS

_MARKERS = (MANIFEST, "model.json", "model_index.json")  # what makes a folder whole, and comes last
_WEIGHTS = ".pdparams"  # in the output folder itself they are those of the last checkpoint


class OutputStore:
    """The copy at `url` of the output folder `folder`. Of one process."""

    def __init__(self, folder: Path, url: str):
        self.folder, self.url = folder, check_address(url).rstrip("/")
        self._own: set[str] = set()  # names of checkpoints that were here and are whole there
        self._sent: dict[str, tuple[int, int]] = {}  # (bytes, time of change) of other files, as they are there
        self._executor, self._pending = ThreadPoolExecutor(1, "output store"), None

    def bring_records(self, mark: str) -> None:
        """The files beside the checkpoints, where this machine has none of the run, which has a file `mark`. Raises
        StoreError, ConfigError for an address with files that are no run."""
        if any(path for path in self.folder.iterdir() if not path.name.startswith((".", LAUNCH_LOGS))):
            return
        found = client.find(self.url)
        if found and mark not in found:
            text = f"--output_dir {self.url} holds files that are not a run of ppldm"
            raise ConfigError(f"{text}; choose another address")
        for name in found:
            if "/" not in name and not name.endswith(_WEIGHTS):
                temporary = self.folder / f".{name}.tmp"
                client.get(f"{self.url}/{name}", temporary)
                finish_file(temporary, self.folder / name)

    def bring_newest(self) -> None:
        """The newest checkpoint of the copy that verifies, where it is later than those here. Raises StoreError."""
        here = max((step_of(folder) for folder in list_checkpoints(self.folder)), default=-1)
        for name in reversed(self._whole()):
            if step_of(Path(name)) <= here or self.bring(name):
                return

    def bring(self, name: str) -> bool:
        """The checkpoint `name` of the copy, where it is not here; whether it verifies. Raises StoreError."""
        target = self.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".fetching", "w") as lock:  # another rank of this machine may do the same
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir():
                return True
            get_logger().info("fetching %s/%s", shown(self.url), name)
            with atomic_dir(target) as temporary:
                for file in client.find(f"{self.url}/{name}"):
                    (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                    client.get(f"{self.url}/{name}/{file}", temporary / file)
            if problem := verify(target):
                get_logger().warning("passing over %s/%s: %s", shown(self.url), name, problem)
                shutil.rmtree(target)
            return problem is None

    def clear(self) -> None:
        """Remove all checkpoints of the copy. Raises StoreError."""
        for name in sorted(filter(is_checkpoint_name, {name.partition("/")[0] for name in client.find(self.url)})):
            self._remove(name)

    def push(self, wait: bool = False) -> None:
        """Bring the copy up to date, in a thread; with `wait` raises OutputError where that fails."""
        if self._pending is None or self._pending.done() or wait:
            self._pending = self._executor.submit(self._push)
        if wait and (error := self._pending.exception()):
            text = f"{self.folder} could not be copied to {shown(self.url)}: {error}; the same command goes on"
            raise OutputError(text) from error

    def _push(self) -> None:
        try:
            self._copy()
        except StoreError as error:
            get_logger().warning("the output is not copied yet, the next checkpoint tries again: %s", error)
            raise

    def _copy(self) -> None:
        whole, here = self._whole(), {folder.name: folder for folder in reversed(list_checkpoints(self.folder))}
        for name, folder in here.items():
            if name not in self._own and not (name in whole and self._is_same(folder)):
                self._send(name, folder)
            self._own.add(name)
        for name in self._own - here.keys():
            self._remove(name)
            self._own.discard(name)
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        for path in sorted(paths, key=lambda path: (path.name in _MARKERS, path)):
            name = path.relative_to(self.folder).as_posix()
            pieces = path.relative_to(self.folder).parts
            if not any(is_checkpoint_name(one) or one.startswith((".", SIGNS_DIR, LAUNCH_LOGS)) for one in pieces):
                self._send_record(name, path)

    def _send(self, name: str, folder: Path) -> None:
        try:
            for path in sorted(folder.rglob("*"), key=lambda path: path.name == MANIFEST):
                if path.is_file():
                    client.put(path, f"{self.url}/{name}/{path.relative_to(folder).as_posix()}")
            get_logger().info("%s is in %s", name, shown(self.url))
        except FileNotFoundError:  # training has removed it meanwhile, and it is removed there too
            get_logger().info("%s was removed before it was copied", name)

    def _send_record(self, name: str, path: Path) -> None:
        try:
            status = path.stat()
            state = status.st_size, status.st_mtime_ns
            if self._sent.get(name) != state:
                client.put(path, f"{self.url}/{name}")
                self._sent[name] = state
        except FileNotFoundError:  # written anew just now, and changed at the next push
            self._sent.pop(name, None)

    def _is_same(self, folder: Path) -> bool:
        """Whether the manifest there, and with it the checksums of all files, is that of a checkpoint here."""
        there = client.stat_now(f"{self.url}/{folder.name}/{MANIFEST}")
        own = folder / MANIFEST
        return there.size == own.stat().st_size and there.md5 in ("", hash_file(own, "md5"))

    def _whole(self) -> list[str]:
        """The names of the checkpoints that are whole there, oldest first."""
        found = [name.partition("/")[0] for name in client.find(self.url) if name.endswith(f"/{MANIFEST}")]
        return sorted(filter(is_checkpoint_name, found), key=lambda name: step_of(Path(name)))

    def _remove(self, name: str) -> None:
        for file in sorted(client.find(f"{self.url}/{name}"), key=lambda file: file != MANIFEST):
            client.remove(f"{self.url}/{name}/{file}")
