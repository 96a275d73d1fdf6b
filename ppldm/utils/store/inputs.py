"""What a flag names to be read whole, such as a model: at the address of a store, its copy on this machine."""

import fcntl
from pathlib import Path

from ..checksums import digest_of
from ..errors import StoreError
from ..files import atomic_dir, cache_dir, local_path, make_output_dir
from ..log import get_logger
from .cache import bring, place_of
from .client import check_address, find, get, is_address, shown


def input_path(value) -> Path:
    """The path of a file or folder that is read: itself, or of an address what is there now, fetched once for each
    state of it, to PPLDM_CACHE_DIR/inputs. Raises StoreError, OutputError, ConfigError."""
    if not is_address(value):
        return local_path(value)
    url = check_address(str(value)).rstrip("/")
    files = find(url)
    if not files:
        place = place_of(url)
        bring(place)
        return place
    state = digest_of({name: (one.size, one.tag) for name, one in files.items()})
    target = cache_dir() / "inputs" / state / url.rpartition("/")[2]
    make_output_dir(target.parent)
    with open(target.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            get_logger().info("fetching %s", shown(url))
            with atomic_dir(target) as temporary:
                for name, stored in files.items():
                    _fetch(f"{url}/{name}", temporary / name, stored.size)
    return target


def _fetch(url: str, path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    get(url, path)
    if path.stat().st_size != size:
        raise StoreError(f"{shown(url)} came with {path.stat().st_size} bytes and not {size}; give the command again")
