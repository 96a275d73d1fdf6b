"""What is put under urllib, which img2dataset fetches with: bounds on what a server can cost us, and good manners.

urllib's timeout is that of one wait on a socket: a server that sends a byte a second holds a thread for days, and one
that never stops sending fills the memory. `install` makes `urllib.request.urlopen` keep, besides, a time for a whole
URL with its redirects, a moment after which nothing more is fetched, and a number of bytes. Every breach is an error of
the fetch, which img2dataset records for its row; so no row is lost. What a server says in an error is escaped and cut.

Only http and https are opened: `file:` and `data:` in metadata from the web would read this machine. With
`refuse_private`, only the public internet is (`public_address`). Hosts are asked as often as `host_limits` allows.

As browsers do: `http://user:password@host/` is fetched as user; an answer that comes compressed, which was not asked
for, is unpacked; ports beyond 65,535 are not a URL. An answer without a byte is a failure, "empty answer".
"""

import base64
import hashlib
import http.client
import io
import random
import ssl
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from urllib.error import HTTPError

from ...utils.errors import ConfigError
from ...utils.text import one_line
from ..block_list import BLOCKED, NOTHING, BlockList
from .host_limits import HostLimits
from .public_address import connect_public, is_named_private, refuse

# Characters that have a meaning in a URL and stay as they are; all others are percent-encoded, as browsers do.
_URL_CHARACTERS = "!#$%&'()*+,/:;=?@[]~"
_MAX_MESSAGE = 300  # characters of a failure that are recorded
_TOO_MANY_BYTES = "too many bytes in one answer"
_JITTER = 0.25
_GZIP_START = b"\x1f\x8b"


@dataclass(frozen=True)
class Bounds:
    """What one URL may cost: seconds from its first byte to its last, redirects included; bytes of one answer."""

    url_seconds: float
    max_bytes: int


class FetchError(OSError):
    """Why a URL could not be had: one line that may be shown."""


class _Fetch(threading.local):
    """What the running fetch of this thread may still use; img2dataset fetches one URL a thread."""

    deadline = None
    max_bytes = 0


_fetch = _Fetch()
_FAILURES = (OSError, ValueError, http.client.HTTPException, zlib.error)


def install(
    bounds: Bounds,
    last_moment: float = float("inf"),
    on_fetch: Callable[[], None] = lambda: None,
    check_certificates: bool = True,
    refuse_private: bool = False,
    requests_per_host: int = 0,
    blocked: BlockList = NOTHING,
) -> None:
    """Make `urllib.request.urlopen` of this process keep `bounds`, until another call.

    `last_moment`, in seconds of time.monotonic, is when everything ends: later fetches fail at once. `on_fetch` is
    called, in the fetching thread, after the answer's headers or the failure of each URL. `requests_per_host`: at a
    time, 0 meaning no limit. URLs of `blocked` are not fetched, and its files not taken. Raises ConfigError where the
    environment names an impossible proxy.
    """
    check_proxies()
    opener = _BoundedOpener(bounds, last_moment, on_fetch, HostLimits(requests_per_host, bounds.url_seconds), blocked)
    for handler in (
        _ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        _RequestCleaner,
    ):
        opener.add_handler(handler())
    # One context for all: each reads the system's certificates, some 20 ms.
    context = ssl.create_default_context()
    if not check_certificates:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener.add_handler(_HTTPHandler(refuse_private))
    opener.add_handler(_HTTPSHandler(refuse_private, context))
    urllib.request.install_opener(opener)


def check_proxies() -> None:
    """Raises ConfigError for a proxy of the environment that has no host or port; its text may hold a password."""
    for name, proxy in urllib.request.getproxies().items():
        if name not in ("http", "https") or not proxy:
            continue
        try:
            split = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            sound = bool(split.hostname) and split.port != 0
        except ValueError:
            sound = False
        if not sound:
            raise ConfigError(
                f"{name}_proxy is not the address of a proxy; write http://user:password@host:port, special characters "
                "of the password as %2F, %40, ..."
            )


class _BoundedOpener(urllib.request.OpenerDirector):
    def __init__(
        self, bounds: Bounds, last_moment: float, on_fetch: Callable[[], None], hosts: HostLimits, blocked: BlockList
    ):
        super().__init__()
        self.bounds, self.last_moment, self.on_fetch, self.hosts = bounds, last_moment, on_fetch, hosts
        self.blocked = blocked

    def open(self, fullurl, data=None, timeout=None):
        if _fetch.deadline is not None:  # a redirect, inside the fetch of the URL that led here
            self._await_turn(_host_of(fullurl.full_url))
            return super().open(fullurl, data, min(timeout, _remaining_seconds()))
        try:
            if time.monotonic() >= self.last_moment:
                raise TimeoutError("deadline: the time of the shard was over")
            request = fullurl if isinstance(fullurl, urllib.request.Request) else urllib.request.Request(fullurl)
            if self.blocked.names(request.full_url):
                raise FetchError(f"{BLOCKED}: the URL is on the block list")
            request.full_url = quote_url(request.full_url)
            return self._fetch(request, data, timeout)
        except _FAILURES as error:
            raise _as_fetch_error(error) from error
        finally:
            self.on_fetch()

    def _fetch(self, request: urllib.request.Request, data, timeout) -> "_Answer":
        host = _host_of(request.full_url)
        self.hosts.enter(host, self.last_moment)
        answer = None
        try:
            _fetch.deadline = min(time.monotonic() + self.bounds.url_seconds, self.last_moment)
            _fetch.max_bytes = self.bounds.max_bytes
            response = self._open_in_turn(request, data, timeout)
            answer = _Answer(response, self.bounds.max_bytes, lambda: self.hosts.leave(host), self.blocked)
            return answer
        finally:
            _fetch.deadline = None
            if answer is None:
                self.hosts.leave(host)

    def _open_in_turn(self, request: urllib.request.Request, data, timeout):
        """As `open`, again and again as long as hosts ask to come back later and the time of the URL allows."""
        while True:
            self._await_turn(_host_of(request.full_url))
            try:
                response = super().open(request, data, min(timeout, _remaining_seconds()))
                self.hosts.note_success(_host_of(response.url))
                return response
            except HTTPError as error:
                error.close()
                asked_sec = self.hosts.note_refusal(_host_of(error.url), error)
                if asked_sec is None or asked_sec >= _fetch.deadline - time.monotonic():
                    raise

    def _await_turn(self, host: str) -> None:
        pause_sec = self.hosts.pause_sec(host)
        if pause_sec >= _fetch.deadline - time.monotonic():
            raise FetchError(f"HTTP Error 429: the host has asked not to be asked for another {pause_sec:.0f} s")
        # Those who waited do not come back all in one moment.
        time.sleep(pause_sec * (1 + random.random() * _JITTER))


def _as_fetch_error(error: Exception) -> FetchError:
    return FetchError(one_line(str(error), _MAX_MESSAGE))


def _host_of(url: str) -> str:
    try:
        return urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return ""


def quote_url(url: str) -> str:
    """A URL with spaces and letters outside ASCII as browsers send it. Raises ValueError "not a URL"."""
    split = urllib.parse.urlsplit(url)
    user, at, host = split.netloc.rpartition("@")
    if not host.isascii():
        try:
            url = split._replace(netloc=user + at + host.encode("idna").decode()).geturl()
        except UnicodeError as error:
            raise ValueError(f"not a URL: {error}") from error
    return urllib.parse.quote(url.strip(), safe=_URL_CHARACTERS)


class _RequestCleaner(urllib.request.BaseHandler):
    """What every request goes through, those of redirects too, before a proxy takes it."""

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        if not hasattr(request, "is_proxied"):  # a new one: urllib copies the proxy's password from before a redirect
            request.remove_header("Proxy-authorization")
        split = urllib.parse.urlsplit(request.full_url)
        try:
            port = split.port
        except ValueError as error:
            raise ValueError(f"not a URL: {error}") from error
        if port == 0:
            raise ValueError("not a URL: port 0")
        user, at, host = split.netloc.rpartition("@")
        if at:
            request.full_url = split._replace(netloc=host).geturl()
            credentials = urllib.parse.unquote_to_bytes(user if ":" in user else f"{user}:")
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(credentials).decode()}")
        return request

    https_request = http_request


class _Answer:
    """What img2dataset takes of an answer: headers, and the whole body, once."""

    def __init__(self, response, max_bytes: int, on_close: Callable[[], None], blocked: BlockList):
        self.headers, self._response, self._max_bytes, self._on_close = response.headers, response, max_bytes, on_close
        self._blocked = blocked

    def read(self) -> bytes:
        """The body, unpacked. Raises FetchError."""
        try:
            body = self._response.read()
            for name in reversed(self.headers.get("Content-Encoding", "").lower().split(",")):
                body = _unpack(body, name.strip(), self._max_bytes)
        except _FAILURES as error:
            raise _as_fetch_error(error) from error
        if not body:
            raise FetchError(f"empty answer (HTTP status {self._response.status})")
        if self._blocked.hashes and self._blocked.names(None, hashlib.sha256(body).hexdigest()):
            raise FetchError(f"{BLOCKED}: the file is on the block list")
        return body

    def __enter__(self) -> "_Answer":
        return self

    def __exit__(self, *_) -> None:
        self._response.close()
        self._on_close()


def _unpack(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The body without one Content-Encoding. Raises FetchError."""
    is_gzip = encoding in ("gzip", "x-gzip")
    # Some servers say "gzip" of pictures that they send as they are.
    if encoding in ("", "identity") or not body or (is_gzip and not body.startswith(_GZIP_START)):
        return body
    if not is_gzip and encoding != "deflate":
        raise FetchError(f"cannot decode Content-Encoding {encoding}, which was not asked for")
    # "deflate" is a zlib stream by RFC 9110, and from some servers a bare one; 47 finds gzip and zlib by the header.
    is_bare = not is_gzip and (body[0] & 15 != 8 or int.from_bytes(body[:2], "big") % 31)
    unpacker = zlib.decompressobj(-15 if is_bare else 47)
    try:
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise FetchError(f"cannot decode Content-Encoding {encoding}: {error}") from error
    if len(unpacked) > max_bytes:
        raise FetchError(_TOO_MANY_BYTES)
    if not unpacker.eof:
        raise FetchError(f"cannot decode Content-Encoding {encoding}: it ends in the middle")
    return unpacked


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
            raise OSError(_TOO_MANY_BYTES)
        return num_bytes

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock, *args, **kwargs):
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_BoundedStream(self.fp.detach()), 65536)

    def _read_status(self):
        """http.client passes over 100 alone of the answers before the answer (103 Early Hints, 102 Processing)."""
        while (found := super()._read_status())[1] // 100 == 1:
            http.client.parse_headers(self.fp)
        return found

    def begin(self) -> None:
        super().begin()
        if self.length is not None and self.length > _fetch.max_bytes:
            raise OSError(_TOO_MANY_BYTES)


class _HTTPConnection(http.client.HTTPConnection):
    response_class = _Response


class _HTTPSConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Public:
    """Of a connection: to public addresses only."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._create_connection = connect_public  # http.client's own way to put another function in its place


class _PublicHTTPConnection(_Public, _HTTPConnection):
    pass


class _PublicHTTPSConnection(_Public, _HTTPSConnection):
    pass


class _ProxyHandler(urllib.request.ProxyHandler):
    """Notes which requests go to a proxy, whose own address may well be private."""

    def proxy_open(self, req, proxy, type):
        req.is_proxied = not (req.host and urllib.request.proxy_bypass(req.host))
        return super().proxy_open(req, proxy, type)


def _is_checked(request: urllib.request.Request) -> bool:
    """Whether the connection of a request has to be checked: not where it is to a proxy, which makes the look-up.

    Raises OSError for a host that says by its very name that it is private.
    """
    host = urllib.parse.unquote(urllib.parse.urlsplit(request.full_url).hostname or "")
    if is_named_private(host):
        raise refuse(host)
    return not getattr(request, "is_proxied", False)


class _HTTPHandler(urllib.request.HTTPHandler):
    def __init__(self, refuse_private: bool):
        super().__init__()
        self.refuse_private = refuse_private

    def http_open(self, req):
        checked = self.refuse_private and _is_checked(req)
        return self.do_open(_PublicHTTPConnection if checked else _HTTPConnection, req)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def __init__(self, refuse_private: bool, context: ssl.SSLContext):
        super().__init__(context=context)
        self.refuse_private = refuse_private

    def https_open(self, req):
        checked = self.refuse_private and _is_checked(req)
        return self.do_open(_PublicHTTPSConnection if checked else _HTTPSConnection, req, context=self._context)
