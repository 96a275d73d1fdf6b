"""Which picture was being decoded when the process of its shard ended, so that the next try goes on without it.

Fetches keep their bounds by themselves; what decodes a picture cannot be interrupted. So while one is decoded, its URL
is in a file beside the shard's journal. After `_DECODE_SECONDS` Python's own watchdog ends the process and says so in
that file; where the process crashed, or was killed for taking too long, the one that started it does (`blame`). Of
a download that was killed as a whole nobody says anything, and the picture is tried again.

    ["URL"]       the picture that is being decoded
    anything      what ended the process, and thereby a verdict on the URL before it
"""

import faulthandler
import json
from pathlib import Path

from .resize import Resizer

_DECODE_SECONDS = 120.0


class WatchedResizer:
    """A `Resizer` for one process, which img2dataset calls with the URL of the row (see `shard._make_downloader`)."""

    def __init__(self, resizer: Resizer, path: Path):
        self._resizer, self._blamed = resizer, read_blamed(path)
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 - for the watchdog
        for url in sorted(self._blamed):
            self._file.write(_line(url) + b"blamed\n")
        self._end = self._file.tell()

    def __call__(self, stream, url: str) -> tuple:
        """As `Resizer.__call__`; a picture that has ended a process fails as "deadline"."""
        if url in self._blamed:
            return *[None] * 5, "deadline: decoding it took too long, or ended the process"
        self._file.write(_line(url))
        faulthandler.dump_traceback_later(_DECODE_SECONDS, file=self._file, exit=True)
        try:
            return self._resizer(stream)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def blame(path: Path) -> None:
    """Hold what a process was decoding responsible for its end."""
    if path.exists():
        with open(path, "ab") as file:
            file.write(b"blamed\n")


def read_blamed(path: Path) -> set[str]:
    """The URLs that have ended a process of this shard."""
    blamed, url = set(), None
    for line in path.read_bytes().splitlines() if path.exists() else ():
        if line.startswith(b"["):
            url = json.loads(line)[0] if line.endswith(b"]") else None
        elif url is not None:
            blamed.add(url)
    return blamed


def _line(url: str) -> bytes:
    return json.dumps([url]).encode() + b"\n"
