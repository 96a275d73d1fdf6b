"""Bounds on what a server can cost us, put under urllib, which img2dataset fetches with.

urllib's timeout is that of one wait on a socket: a server that sends a byte a second holds a thread for days, and one
that never stops sending fills the memory. `install` makes `urllib.request.urlopen` keep, besides, a time for a whole
URL with its redirects, a moment after which nothing more is fetched, and a number of bytes. Every breach is an error of
the fetch, which img2dataset records for its row; so no row is lost.

Only http and https are opened: `file:` and `data:` in metadata from the web would read this machine.
"""

import http.client
import io
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

# Characters that have a meaning in a URL and stay as they are; all others are percent-encoded, as browsers do.
_URL_CHARACTERS = "!#$%&'()*+,/:;=?@[]~"


@dataclass(frozen=True)
class Bounds:
    """What one URL may cost: seconds from its first byte to its last, redirects included; bytes of one answer."""

    url_seconds: float
    max_bytes: int


class _Fetch(threading.local):
    """What the running fetch of this thread may still use; img2dataset fetches one URL a thread."""

    deadline = None
    max_bytes = 0


_fetch = _Fetch()


def install(
    bounds: Bounds,
    last_moment: float = float("inf"),
    on_fetch: Callable[[], None] = lambda: None,
    check_certificates: bool = True,
) -> None:
    """Make `urllib.request.urlopen` of this process keep `bounds`, until another call.

    `last_moment`, in seconds of time.monotonic, is when everything ends: later fetches fail at once. `on_fetch` is
    called, in the fetching thread, after the answer's headers or the failure of each URL.
    """
    opener = _BoundedOpener(bounds, last_moment, on_fetch)
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        _HTTPHandler,
    ):
        opener.add_handler(handler())
    # One context for all: each reads the system's certificates, some 20 ms.
    context = ssl.create_default_context()
    if not check_certificates:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener.add_handler(_HTTPSHandler(context=context))
    urllib.request.install_opener(opener)


class _BoundedOpener(urllib.request.OpenerDirector):
    def __init__(self, bounds: Bounds, last_moment: float, on_fetch: Callable[[], None]):
        super().__init__()
        self.bounds, self.last_moment, self.on_fetch = bounds, last_moment, on_fetch

    def open(self, fullurl, data=None, timeout=None):
        if _fetch.deadline is not None:  # a redirect, inside the fetch of the URL that led here
            return super().open(fullurl, data, min(timeout, _remaining_seconds()))
        now = time.monotonic()
        if now >= self.last_moment:
            self.on_fetch()
            raise TimeoutError("deadline: the time of the shard was over")
        if isinstance(fullurl, urllib.request.Request):
            fullurl.full_url = quote_url(fullurl.full_url)
        _fetch.deadline = min(now + self.bounds.url_seconds, self.last_moment)
        _fetch.max_bytes = self.bounds.max_bytes
        try:
            return super().open(fullurl, data, min(timeout, _remaining_seconds()))
        finally:
            _fetch.deadline = None
            self.on_fetch()


def quote_url(url: str) -> str:
    """A URL with spaces and letters outside ASCII as browsers send it. Raises ValueError "not a URL"."""
    split = urllib.parse.urlsplit(url)
    if not split.netloc.isascii():
        try:
            url = split._replace(netloc=split.netloc.encode("idna").decode()).geturl()
        except UnicodeError as error:
            raise ValueError(f"not a URL: {error}") from error
    return urllib.parse.quote(url.strip(), safe=_URL_CHARACTERS)


def _remaining_seconds() -> float:
    remaining = _fetch.deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("deadline: the time of the URL was over")
    return remaining


class _BoundedStream(io.RawIOBase):
    """The bytes of a connection, as long as its fetch may go on. A single wait is bounded by the socket's timeout."""

    def __init__(self, raw: io.RawIOBase):
        self._raw, self._deadline, self._bytes_left = raw, _fetch.deadline, _fetch.max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        if time.monotonic() > self._deadline:
            raise TimeoutError("deadline: the time of the URL was over")
        num_bytes = self._raw.readinto(buffer)
        self._bytes_left -= num_bytes or 0
        if self._bytes_left < 0:
            raise OSError("too many bytes in one answer")
        return num_bytes

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock, *args, **kwargs):
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_BoundedStream(self.fp.detach()), 65536)

    def begin(self) -> None:
        super().begin()
        if self.length is not None and self.length > _fetch.max_bytes:
            raise OSError("too many bytes in one answer")


class _HTTPConnection(http.client.HTTPConnection):
    response_class = _Response


class _HTTPSConnection(http.client.HTTPSConnection):
    response_class = _Response


class _HTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, req):
        return self.do_open(_HTTPConnection, req)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, req):
        return self.do_open(_HTTPSConnection, req, context=self._context)
