"""Which hosts may be asked, and how often: the public internet only, and no host more than it likes."""

from __future__ import annotations

import ipaddress
import random
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from urllib.error import HTTPError

# How long a host is left alone at first: this share of a URL's time where it asks for more, seconds where it asks for
# no time.
_FIRST_SHARE = 0.25
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 1.0, 60.0
# A host that asks for more than this is asked again all the same.
_MAX_RETRY_AFTER_SEC = 3600.0
_JITTER = 0.25
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def host_of(url: str) -> str:
    """The name of a URL's host in lower case, without a dot at its end; "" where it has none."""
    try:
        return (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    except ValueError:  # a damaged IPv6 address
        return ""


class HostLimits:
    """How much one host is asked at once, and how long it is left alone where it says that this is too much.

    Laws. At most `max_requests` fetches of URLs of one host run at a time, 0 meaning any number. After an answer 429,
    or 503 with `Retry-After`, the host is not asked for the time that it names, or else for 1, 2, 4, ... 60 seconds,
    until it answers well again. A time that no URL can wait for ends the fetch of the URL that was answered so; the
    others of the host wait for 1/4 of `url_seconds`, after the next such answer for 1/2, and so on: one answer does
    not stop a host, and a host that insists is left alone. All of this is of one process: a download of 16 processes
    may ask a host 16 times as much. Times are of time.monotonic, in seconds.
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
        # Those who waited do not come back all in one moment.
        time.sleep(pause_sec * (1 + random.random() * _JITTER))

    def pause_sec(self, host: str) -> float:
        """How long the host is still to be left alone."""
        with self._changed:
            return max(0.0, self._not_before.get(host, 0.0) - time.monotonic())

    def note_success(self, host: str) -> None:
        """The host has answered well: the next refusal is its first."""
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
    """The seconds that a header `Retry-After` asks to wait, a number or a date, at most an hour; None if it is neither.

    https://www.rfc-editor.org/rfc/rfc9110#field.retry-after
    """
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(float(value[:9]), _MAX_RETRY_AFTER_SEC)
    try:
        seconds = parsedate_to_datetime(value).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_SEC)


def is_public(address: str) -> bool:
    """Whether an IPv4 or IPv6 address, given as text, belongs to the public internet.

    Loopback, link-local, private, shared (100.64.0.0/10), multicast and reserved addresses do not, nor do IPv6
    addresses that stand for such an IPv4 address (mapped, 6to4, NAT64).
    """
    ip = ipaddress.ip_address(address)
    if ip.version == 6:
        embedded = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded:
            return is_public(str(embedded))
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def is_named_private(host: str) -> bool:
    """Whether a host's name itself, without a look-up, says that it is not public: an address, or localhost.

    Addresses in the older spellings too, such as 127.1 and 2130706433.
    """
    name = host.lower().rstrip(".")
    try:
        return not is_public(name)
    except ValueError:
        pass
    try:
        return not is_public(socket.inet_ntoa(socket.inet_aton(name)))
    except (OSError, ValueError):  # ValueError: a NUL
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
