"""A URL fetched, whatever its server does: bounds on what one may cost, and good manners.

img2dataset's own fetch bounds only a single wait on a socket: a server that sends a byte a second holds a thread for
days, and one that never stops fills the memory. So URLs are fetched here, and its writers write what comes (`shard`).

Every failure is a FetchError, recorded for its row in the words of img2dataset, which `failures` reads; what a server
says in them is escaped and cut.

Only http and https are opened: `file:` and `data:` would read this machine. With `refuse_private`, only the public
internet is: `http://169.254.169.254/…` would hand a cloud machine's credentials to the data set. What is checked is the
address that is connected to, of every redirect too, so a name that resolves to a private one does not help either.

As browsers do: `http://user:password@host/` is fetched as user; an answer that comes compressed is unpacked.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import ipaddress
import math
import random
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import partial
from queue import SimpleQueue
from urllib.error import HTTPError

from ...utils.errors import ConfigError
from ...utils.text import one_line
from ..block_list import BLOCKED, NOTHING, BlockList

_USER_AGENT = "Mozilla/5.0 (X11; Ubuntu; Linux x86_64; rv:72.0) Gecko/20100101 Firefox/72.0"  # as img2dataset's
_URL_CHARACTERS = "!#$%&'()*+,/:;=?@[]~"  # that stay as they are; all others are percent-encoded, as browsers do
_MAX_MESSAGE = 300  # characters of a failure that are recorded
_TOO_MANY_BYTES = "too many bytes in one answer"
_GZIP_START = b"\x1f\x8b"
_FIRST_SHARE = 0.25  # of a URL's time, for which a host is left alone at first that asks for more
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 1.0, 60.0  # where it asks for no time
_MAX_RETRY_AFTER_SEC = 3600.0  # a host that asks for more is asked again all the same
_JITTER = 0.25
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class FetchError(OSError):
    """Why a URL could not be had: one line that may be shown."""


@dataclass(frozen=True)
class FetchSettings:
    """`timeout`: seconds of one wait on a socket. `url_seconds`, `max_bytes`: what one URL may cost, redirects
    included, and one answer. `requests_per_host`: at a time, 0 meaning no limit."""

    timeout: float
    retries: int
    url_seconds: float
    max_bytes: int
    requests_per_host: int = 0
    user_agent_token: str | None = None
    disallowed_header_directives: tuple[str, ...] = ()
    check_certificates: bool = True
    refuse_private: bool = True
    blocked: BlockList = NOTHING

    def __post_init__(self):
        require("retries", self.retries, 0)
        require("requests-per-host", self.requests_per_host, 0)
        for name in ("timeout", "url_seconds", "max_bytes"):
            require(name.replace("_", "-"), getattr(self, name))


def require(flag: str, value: float, least: int | None = None) -> None:
    """Raises ConfigError for the value of a flag that is below `least`, or not more than 0."""
    if least is not None and value < least:
        raise ConfigError(f"--{flag} is {value}; it must be at least {least}")
    if least is None and not value > 0:
        raise ConfigError(f"--{flag} is {value}; it must be more than 0")


class Fetcher:
    """Fetches URLs in threads until `last_moment` of time.monotonic. Raises ConfigError for a bad proxy."""

    def __init__(self, settings: FetchSettings, last_moment: float = math.inf):
        check_proxies()
        self.settings, self.last_moment = settings, last_moment
        self.hosts = HostLimits(settings.requests_per_host, settings.url_seconds)
        self._token = (settings.user_agent_token or "").strip().lower()
        self._forbidding = {directive.strip().lower() for directive in settings.disallowed_header_directives}
        self._opener = urllib.request.OpenerDirector()
        for name in ("ProxyHandler", "UnknownHandler", "HTTPDefaultErrorHandler", "HTTPErrorProcessor"):
            self._opener.add_handler(getattr(urllib.request, name)())
        self._opener.add_handler(_Web(settings, self.hosts))

    def fetch_all(self, urls: Mapping[int, str | None], num_threads: int) -> Iterator[tuple[int, bytes | FetchError]]:
        """(number, the file of its URL) as they come. At most twice as many files as threads wait to be taken."""
        done: SimpleQueue = SimpleQueue()
        with ThreadPoolExecutor(num_threads) as executor:
            try:
                for count, (number, url) in enumerate(urls.items()):
                    if count >= 2 * num_threads:
                        yield done.get().result()
                    task = executor.submit(lambda number=number, url=url: (number, self.fetch(url)))
                    task.add_done_callback(done.put)
                for _ in range(min(len(urls), 2 * num_threads)):
                    yield done.get().result()
            finally:
                executor.shutdown(wait=False, cancel_futures=True)

    def fetch(self, url: str | None) -> bytes | FetchError:
        """The file of a URL, or why it could not be had, after as many tries as the settings say."""
        for _ in range(self.settings.retries + 1):
            try:
                return self._fetch(url)
            except Exception as error:  # what servers can make urllib's parsers raise is not a list
                failure = FetchError(one_line(str(error), _MAX_MESSAGE))
        return failure

    def _fetch(self, url: str | None) -> bytes:
        if time.monotonic() >= self.last_moment:
            raise TimeoutError("deadline: the time of the shard was over")
        request = urllib.request.Request(url)  # type: ignore[arg-type]  # it refuses None, too, as img2dataset records
        if self.settings.blocked.names(request.full_url):
            raise FetchError(f"{BLOCKED}: the URL is on the block list")
        url = quote_url(request.full_url)
        with self.hosts.slot(host_of(url), self.last_moment):
            deadline = min(time.monotonic() + self.settings.url_seconds, self.last_moment)
            with self._open_in_turn(url, deadline) as answer:
                if self._is_forbidden(answer.headers):
                    raise FetchError("Use of image disallowed by X-Robots-Tag directive")
                body = answer.read()
        for name in reversed(answer.headers.get("Content-Encoding", "").lower().split(",")):
            body = _unpack(body, name.strip(), self.settings.max_bytes)
        if not body:
            raise FetchError(f"empty answer (HTTP status {answer.status})")
        blocked = self.settings.blocked
        if blocked.hashes and blocked.names(None, hashlib.sha256(body).hexdigest()):
            raise FetchError(f"{BLOCKED}: the file is on the block list")
        return body

    def _open_in_turn(self, url: str, deadline: float) -> http.client.HTTPResponse:
        """The answer, asked for again and again as long as hosts ask to come back later and the deadline allows."""
        token = f" (compatible; {self._token}; +https://github.com/rom1504/img2dataset)" if self._token else ""
        while True:
            request = _Request(url, {"User-Agent": _USER_AGENT + token}, deadline)
            try:
                answer = self._opener.open(request, timeout=self.settings.timeout)
                self.hosts.note_success(host_of(answer.url))
                return answer
            except HTTPError as error:
                error.close()
                asked_sec = self.hosts.note_refusal(host_of(error.url), error)
                if asked_sec is None or asked_sec >= deadline - time.monotonic():
                    raise

    def _is_forbidden(self, headers: Message) -> bool:
        """Whether the site forbids the use, to all or to our name."""
        for value in headers.get_all("X-Robots-Tag", []):
            name, colon, listed = value.lower().partition(":")
            words = {word.strip() for word in (listed if colon else name).split(",")}
            if words & self._forbidding and (not colon or name == self._token):
                return True
        return False


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


class _Request(urllib.request.Request):
    """A request until `deadline`. `own_host` stays where `host` becomes that of a proxy. The URL's password goes into
    a header, which no redirect takes along. Raises ValueError "not a URL" for a wrong port."""

    def __init__(self, url: str, headers: Mapping[str, str], deadline: float):
        split = urllib.parse.urlsplit(url)
        try:
            if split.port == 0:
                raise ValueError("port 0")
        except ValueError as error:
            raise ValueError(f"not a URL: {error}") from error
        user, at, host = split.netloc.rpartition("@")
        super().__init__(split._replace(netloc=host).geturl() if at else url, headers=dict(headers))
        if at:
            credentials = urllib.parse.unquote_to_bytes(user if ":" in user else f"{user}:")
            self.add_unredirected_header("Authorization", f"Basic {base64.b64encode(credentials).decode()}")
        self.deadline, self.own_host = deadline, self.host


class _Web(urllib.request.HTTPRedirectHandler, urllib.request.AbstractHTTPHandler):
    """What every request of http and https goes through, those of redirects too."""

    def __init__(self, settings: FetchSettings, hosts: HostLimits):
        super().__init__()
        self._settings, self._hosts = settings, hosts
        # One for all connections: each reads the system's certificates, some 20 ms.
        self._context = ssl.create_default_context()
        if not settings.check_certificates:
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        new.remove_header("Proxy-authorization")  # the proxy's own password, which may now go elsewhere
        return _Request(new.full_url, new.headers, req.deadline)

    def http_request(self, request: _Request) -> urllib.request.Request:
        self._hosts.await_turn(host_of(request.full_url), request.deadline)
        request.timeout = min(request.timeout, _remaining_seconds(request.deadline))
        return self.do_request_(request)

    https_request = http_request

    def http_open(self, request: _Request):
        return self.do_open(partial(self._connect, http.client.HTTPConnection, request), request)

    def https_open(self, request: _Request):
        connect = partial(self._connect, http.client.HTTPSConnection, request, context=self._context)
        return self.do_open(connect, request)

    def _connect(self, kind: type, request: _Request, host: str, **options) -> http.client.HTTPConnection:
        """A connection whose answers are bounded. Raises OSError for a host that is private by its very name."""
        connection = kind(host, **options)
        connection.response_class = partial(_Response, request.deadline, self._settings.max_bytes)
        if self._settings.refuse_private:
            own_host = urllib.parse.unquote(host_of(request.full_url))
            if is_named_private(own_host):
                raise refuse(own_host)
            if request.host == request.own_host:  # else a proxy's, which may be private; the proxy makes the look-up
                connection._create_connection = connect_public  # http.client's own way to put another in its place
        return connection


class _Response(http.client.HTTPResponse):
    def __init__(self, deadline: float, max_bytes: int, sock, **options):
        super().__init__(sock, **options)
        self._max_bytes = max_bytes
        self.fp = io.BufferedReader(_BoundedStream(self.fp.detach(), deadline, max_bytes), 65536)

    def _read_status(self):
        """Pass over all answers before the answer (102 Processing, 103 Early Hints); http.client does for 100 only."""
        while (found := super()._read_status())[1] // 100 == 1:
            http.client.parse_headers(self.fp)
        return found

    def begin(self) -> None:
        super().begin()
        if self.length is not None and self.length > self._max_bytes:
            raise OSError(_TOO_MANY_BYTES)


class _BoundedStream(io.RawIOBase):
    """The bytes of a connection, as long as its fetch may go on. A single wait is bounded by the socket's timeout."""

    def __init__(self, raw: io.RawIOBase, deadline: float, max_bytes: int):
        self._raw, self._deadline, self._bytes_left = raw, deadline, max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        _remaining_seconds(self._deadline)
        num_bytes = self._raw.readinto(buffer)
        self._bytes_left -= num_bytes or 0
        if self._bytes_left < 0:
            raise OSError(_TOO_MANY_BYTES)
        return num_bytes

    def close(self) -> None:
        self._raw.close()
        super().close()


def _remaining_seconds(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("deadline: the time of the URL was over")
    return remaining


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


def host_of(url: str) -> str:
    """The name of a URL's host in lower case, without a dot at its end; "" where it has none."""
    try:
        return (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    except ValueError:  # a damaged IPv6 address
        return ""


class HostLimits:
    """How much one host is asked at once, and how long it is left alone where it says that this is too much.

    Laws, of one process. At most `max_requests` fetches of URLs of one host run at a time, 0 meaning any number. After
    an answer 429, or 503 with `Retry-After`, the host is not asked for the time that it names, else for 1, 2, 4, ... 60
    seconds, until it answers well again. A time too long for the URL that was answered so ends its fetch; the others of
    the host wait for 1/4 of `url_seconds`, after the next such answer for 1/2, and so on: one answer does not stop a
    host, and a host that insists is left alone.
    """

    def __init__(self, max_requests: int, url_seconds: float = 60.0):
        self.max_requests, self.url_seconds = max_requests, url_seconds
        self._changed = threading.Condition()
        self._running: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}
        self._refusals: Counter[str] = Counter()

    @contextmanager
    def slot(self, host: str, last_moment: float) -> Iterator[None]:
        """Wait until a fetch of the host may begin, which is the block. Raises TimeoutError at `last_moment`."""
        with self._changed:
            while self.max_requests and self._running[host] >= self.max_requests:
                if not self._changed.wait(min(last_moment - time.monotonic(), threading.TIMEOUT_MAX)):
                    raise TimeoutError("deadline: the time of the shard was over")
            self._running[host] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[host] -= 1
                self._running += Counter()  # without zeros
                self._changed.notify_all()

    def await_turn(self, host: str, deadline: float) -> None:
        """Wait as long as the host is to be left alone. Raises TimeoutError where that is beyond the deadline."""
        pause_sec = self.pause_sec(host)
        if pause_sec >= deadline - time.monotonic():
            raise TimeoutError(f"HTTP Error 429: the host has asked not to be asked for another {pause_sec:.0f} s")
        time.sleep(pause_sec * (1 + random.random() * _JITTER))  # not all come back in one moment

    def pause_sec(self, host: str) -> float:
        with self._changed:
            return max(0.0, self._not_before.get(host, 0.0) - time.monotonic())

    def note_success(self, host: str) -> None:
        with self._changed:
            self._refusals.pop(host, None)

    def note_refusal(self, host: str, error: HTTPError) -> float | None:
        """Leave the host alone for a while, where its answer asks for that; for how many seconds it does, or None."""
        asked_sec = read_retry_after(error.headers.get("Retry-After", ""))
        if error.code != 429 and not (error.code == 503 and asked_sec is not None):
            return None
        with self._changed:
            now = time.monotonic()
            if now >= self._not_before.get(host, 0.0):  # one refusal for all that were sent together
                self._refusals[host] += 1
            growth = 2 ** min(self._refusals[host] - 1, 16)
            if asked_sec is None:
                asked_sec = bound_sec = min(_FIRST_PAUSE_SEC * growth, _LONGEST_PAUSE_SEC)
            else:
                bound_sec = _FIRST_SHARE * self.url_seconds * growth
            self._not_before[host] = max(self._not_before.get(host, 0.0), now + min(asked_sec, bound_sec))
        return asked_sec


def read_retry_after(value: str) -> float | None:
    """The seconds that `Retry-After` (RFC 9110) asks to wait, a number or a date, at most an hour; None for neither."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(float(value[:9]), _MAX_RETRY_AFTER_SEC)
    try:
        seconds = parsedate_to_datetime(value).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_SEC)


def is_public(address: str) -> bool:
    """Whether an address is of the public internet; IPv6 that stands for IPv4 is where that is."""
    ip = ipaddress.ip_address(address)
    if ip.version == 6:
        embedded = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded:
            return is_public(str(embedded))
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def is_named_private(host: str) -> bool:
    """Whether a host's very name says that it is not public: an address, also as 127.1 or 2130706433, or localhost."""
    name = host.lower().rstrip(".")
    with suppress(ValueError):
        return not is_public(name)
    with suppress(OSError, ValueError):  # ValueError: a NUL
        return not is_public(socket.inet_ntoa(socket.inet_aton(name)))
    return name == "localhost" or name.endswith(".localhost")


def connect_public(address: tuple[str, int], *options) -> socket.socket:
    """As socket.create_connection, to a public address of the host only. Raises OSError "private address"."""
    host, port = address
    problem = None
    for *_, found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if not is_public(found[0]):
            problem = problem or refuse(found[0])
            continue
        try:
            return socket.create_connection(found[:2], *options)
        except OSError as error:
            problem = error
    raise problem or OSError("[Errno -5] No address associated with hostname")


def refuse(address: str) -> OSError:
    """The error of a fetch that would leave the public internet."""
    return OSError(f"private address {address}, which a list from the web must not reach")
