"""One file from a server, once: resumed where it broke off, compared with its size and SHA-256, finished or absent.

What has arrived lies in `.NAME.part`, and `.NAME.part.json` says of which state of the file it is (its ETag, or time of
change). The rest is asked for by Range and If-Range: a file that changed meanwhile begins anew. A server that breaks
off, hangs or asks for patience (429, 503, Retry-After) is asked again while it still gives something, else _TRIES
times. The token of the hub is sent to the hub only, and never kept.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ...utils.checksums import hash_file
from ...utils.errors import DataError, EnvironmentProblem
from ...utils.files import finish_file, make_output_dir, read_json, write_json
from ...utils.log import get_logger

_TRIES = 8  # in a row without a new byte
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 60.0
_TIMEOUT_SECONDS = (10, 60)  # to connect, of silence
_BLOCK_BYTES = 1 << 20
_PASSING = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class RemoteFile:
    """name: where it goes, below the folder of the source. url: "" where the list of links has not been given. size,
    sha256: None where nobody says. page: of its terms, or its list. is_link: whether its address expires."""

    name: str
    url: str
    size: int | None = None
    sha256: str | None = None
    page: str = ""
    is_hub: bool = False
    is_link: bool = False


class _TryAgain(Exception):
    """Its second argument: for how many seconds the server wants to be left alone; None where it does not say."""


def fetch(file: RemoteFile, folder: Path) -> Path:
    """The file below `folder`, fetched unless it is there. Raises DataError, EnvironmentProblem."""
    path = folder / file.name
    part = path.with_name(f".{path.name}.part")
    if is_fetched(file, folder):
        _drop(part)  # of which a kill may have left the note
        return path
    if not file.url:
        raise DataError(f"{file.name} is still to be fetched; name the list with its link by --links ({file.page})")
    make_output_dir(path.parent)
    _persist(file, lambda: _fetch_rest(file, part), lambda: _size_of(part))
    if file.sha256 and hash_file(part) != file.sha256:
        _drop(part)
        raise DataError(f"{file.name} arrived damaged (its SHA-256 is not the one stated); give the same command again")
    finish_file(part, path)
    _drop(part)
    return path


def is_fetched(file: RemoteFile, folder: Path) -> bool:
    """Whether the file is there, of the size that is stated."""
    path = folder / file.name
    return path.is_file() and file.size in (None, path.stat().st_size)


def measure_speed(file: RemoteFile, seconds: float = 3.0, most_bytes: int = 32 << 20) -> tuple[float, int | None]:
    """(bytes a second, size of the file) of a look at its beginning; nothing is kept. Raises as `fetch`."""
    answer = _persist(file, lambda: _ask(file, {}), lambda: 0)
    started, read = time.monotonic(), 0
    with answer:
        for block in answer.iter_content(_BLOCK_BYTES):
            read += len(block)
            if read >= most_bytes or time.monotonic() - started > seconds:
                break
    return read / max(time.monotonic() - started, 1e-3), _stated_size(answer)


def _persist(file: RemoteFile, act: Callable, measure: Callable[[], int]):
    """What `act` returns, once it raises no _TryAgain. Raises EnvironmentProblem where `measure` does not grow."""
    failures = 0
    while True:
        before = measure()
        try:
            return act()
        except _TryAgain as error:
            reason, seconds = error.args
            failures = 1 if measure() > before else failures + 1
            if failures >= _TRIES:
                raise EnvironmentProblem(
                    f"{file.name} cannot be fetched ({reason}); the same command goes on where it stopped"
                ) from error
            wait = _FIRST_WAIT_SECONDS * 2 ** (failures - 1) if seconds is None else seconds
            get_logger().info("%s: %s; trying again", file.name, reason)
            time.sleep(min(wait, _LONGEST_WAIT_SECONDS))


def _drop(part: Path) -> None:
    """Remove what has arrived of a file, and what is known of it."""
    part.unlink(missing_ok=True)
    _note(part).unlink(missing_ok=True)


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fetch_rest(file: RemoteFile, part: Path) -> None:
    """Add to `part` what it lacks. Raises _TryAgain where something is still missing."""
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    start, version = _size_of(part), (read_json(_note(part)) or {}).get("version")
    if start and start == file.size:
        return
    headers = {"Range": f"bytes={start}-", "If-Range": version} if start and version else {}
    with _ask(file, headers) as answer:
        if answer.status_code == 416:
            _drop(part)
            raise _TryAgain("it changed on the server", None)
        if answer.status_code != 206 or not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            _drop(part)
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "W/"
            write_json(_note(part), {"version": None if version.startswith("W/") else version})
        try:
            with open(part, "ab") as out:
                # Bytes as they are sent: what is stored compressed stays so.
                for block in answer.raw.stream(_BLOCK_BYTES, decode_content=False):
                    out.write(block)
        except (RequestException, HTTPError, ConnectionError, TimeoutError) as error:
            raise _TryAgain(f"the connection broke off ({type(error).__name__})", None) from error
    expected = file.size if file.size is not None else _stated_size(answer)
    if expected is not None and _size_of(part) != expected:
        if _size_of(part) > expected:
            _drop(part)
        raise _TryAgain(f"{_size_of(part):,} of {expected:,} bytes have arrived", None)


def _ask(file: RemoteFile, headers: dict):
    """The answer's head, whose status is 200, 206 or 416. Raises _TryAgain, DataError."""
    import requests

    headers = {"Accept-Encoding": "identity", **headers}
    if file.is_hub:
        from huggingface_hub import get_token

        headers |= {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    try:
        answer = requests.get(file.url, headers=headers, stream=True, timeout=_TIMEOUT_SECONDS)
    except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
        raise _TryAgain(f"no answer of {urlsplit(file.url).hostname} ({type(error).__name__})", None) from error
    except requests.RequestException as error:
        raise DataError(f"{file.name}: its address cannot be fetched ({type(error).__name__}); check it") from error
    if answer.status_code in (200, 206, 416):
        return answer
    answer.close()
    if answer.status_code in _PASSING:
        after = answer.headers.get("Retry-After") or ""
        raise _TryAgain(f"the server answers {answer.status_code}", float(after) if after.isdigit() else None)
    raise refusal(file, answer.status_code)


def refusal(file: RemoteFile, status: int) -> DataError:
    if file.is_link:
        return DataError(
            f"the link of {file.name} is refused ({status}): such links expire; get a new list at {file.page} and give "
            "the same command with --links FILE; what has arrived stays"
        )
    if status in (401, 403):
        return DataError(
            f"{file.name} is not open to everybody ({status}); accept the terms at {file.page}, and put a token of "
            "your account (https://huggingface.co/settings/tokens) into the variable HF_TOKEN"
        )
    return DataError(f"{file.name} is not there any longer (the server answers {status}); {file.page} may say why")


def _stated_size(answer) -> int | None:
    """Of the whole file."""
    _, _, total = (answer.headers.get("Content-Range") or "").partition("/")
    stated = total if answer.status_code == 206 else answer.headers.get("Content-Length")
    return int(stated) if stated and stated.isdigit() else None
