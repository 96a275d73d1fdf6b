"""What `index.json` beside shards of MDS says of each: how many bytes it has, and their hashes."""

import hashlib
from functools import lru_cache
from pathlib import Path

from ....utils.checksums import hash_file
from ....utils.errors import PartError
from ....utils.files import read_json

_NAME = "index.json"


def check_stated(path: Path) -> None:
    """Compare a shard with what `index.json` says of it, as far as it does: its bytes, and those of its hashes that
    Python knows. Raises PartError, OSError."""
    stated, num_bytes = _find_stated(path.parent).get(path.name, {}), path.stat().st_size
    if num_bytes != stated.get("bytes", num_bytes):
        raise PartError(f"{path} has {num_bytes} bytes where {_NAME} says {stated['bytes']}; get it again")
    for name, digest in stated.get("hashes", {}).items():
        if name in hashlib.algorithms_guaranteed and hash_file(path, name) != digest:
            raise PartError(f"{path} does not have the {name} that {_NAME} says; get it again")


def _find_stated(folder: Path) -> dict[str, dict]:
    try:
        return _read_stated(folder / _NAME, (folder / _NAME).stat().st_mtime_ns)
    except FileNotFoundError:
        return {}


@lru_cache(maxsize=4)
def _read_stated(path: Path, changed: int) -> dict[str, dict]:
    """{`bytes`, `hashes`} of each file by its name: all shards of a folder ask for them."""
    try:
        files = [shard.get(kind) or {} for shard in read_json(path)["shards"] for kind in ("raw_data", "zip_data")]
        return {file["basename"]: {"bytes": file["bytes"], "hashes": dict(file["hashes"])} for file in files if file}
    except (AttributeError, KeyError, TypeError, ValueError):  # of something else, or damaged
        return {}
