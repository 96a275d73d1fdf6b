"""Where a model comes from, and the SHA-256 of its weights, by which others know it: computed once and kept.

Of a file its own, as `sha256sum` prints it. Of a folder that of what `sha256sum` prints of its weights' files, by
their paths in the folder, in their order.
"""

import hashlib
from pathlib import Path

from ...utils.checksums import digest_of, file_sha256
from ...utils.errors import OutputError
from ...utils.files import cache_dir, read_json, write_json
from ...utils.log import get_logger
from ...weights.fetch import locate_model

_WEIGHTS = (".safetensors", ".pdparams", ".bin", ".ckpt", ".pt", ".pth")


def describe_source(model: str, offline: bool, **told) -> dict:
    """Where a model comes from, as its pictures say it, so that `ppldm generate --like` draws them again."""
    sha256 = model_sha256(locate_model(model, offline))
    return {"model": model, "sha256": sha256, **{name: value for name, value in told.items() if value}}


def model_sha256(path: Path) -> str:
    """64 hexadecimal digits; "" of a folder without weights. Raises OSError."""
    if path.is_file():
        return _kept_sha256(path)
    files = sorted(one for one in path.rglob("*") if one.suffix in _WEIGHTS and one.is_file())
    lines = [f"{_kept_sha256(one)}  {one.relative_to(path).as_posix()}\n" for one in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def _kept_sha256(path: Path) -> str:
    """A file's, read again only where it has changed since; what is kept lies in the cache folder, where that can be
    written."""
    stat = path.stat()
    state = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    kept = cache_dir() / "sha256" / f"{digest_of(state[0])}.json"
    known = read_json(kept, optional=True)
    if isinstance(known, list) and known[:-1] == state:
        return known[-1]
    found = file_sha256(path)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, [*state, found])
    except (OSError, OutputError):
        get_logger().debug("%s cannot be written; the next run computes the hash of %s again", kept, path)
    return found
