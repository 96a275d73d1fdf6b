"""Is it the network that fails, or are the links dead?

Of the links of an old data set a fifth or more are dead; those rows are counted, and that is all. A resolver that gives
up under load, a proxy or certificates that are missing look the same in a table of failures, but cost half of the data
in silence. The two differ: a dead host's name does not come back when asked for again; sites refuse one by one, not
half of the web at once.
"""

import socket
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .failures import classify, is_resolver_trouble

# Shares of all URLs above which the network is at fault, well above what dead links of the web cause.
MAX_RESOLVER_TROUBLE, MAX_DNS, MAX_TLS, MAX_PROXY, MAX_UNREACHABLE, MAX_TIMEOUT = 0.05, 0.3, 0.2, 0.05, 0.3, 0.5
# So few failures prove nothing.
_MIN_FAILURES = 8
_LOOKUPS, _PAUSE_SECONDS, _MAX_SECONDS = 3, 0.2, 60


def find_network_fault(counts: Counter, num_urls: int, resolver_trouble: int = 0) -> str | None:
    """What is wrong with the network and the remedy, in one line; None where nothing is.

    `counts`: failed URLs by class. `resolver_trouble`: of those of class dns, how many the resolver is to blame for.
    """

    def over(number: int, share: float) -> bool:
        return number >= _MIN_FAILURES and number > share * num_urls

    def of(number: int) -> str:
        return f"{number} of {num_urls} URLs ({number / num_urls:.0%})"

    unreachable = counts["unreachable"] + counts["refused"]
    if resolver_trouble >= enough_trouble(num_urls) or over(counts["dns"], MAX_DNS):
        blame = f", at least {resolver_trouble} of them for want of a sound resolver" if resolver_trouble else ""
        return (
            f"DNS: look-ups of host names fail for {of(counts['dns'])}{blame}; {_resolvers()}; run a caching resolver "
            "on this machine (sudo apt install knot-resolver or unbound, then nameserver 127.0.0.1 in "
            "/etc/resolv.conf), or without root ask for less at once: fewer --processes-count and --thread-count"
        )
    if over(counts["tls"], MAX_TLS):
        return (
            f"TLS: certificates are not trusted for {of(counts['tls'])}; set the clock, install ca-certificates or "
            'export SSL_CERT_FILE="$(python -m certifi)"; behind a proxy that opens TLS, name its certificate there'
        )
    if over(counts["proxy"], MAX_PROXY):
        return f"the proxy refuses {of(counts['proxy'])} ({_proxies()}); mend http_proxy and https_proxy"
    if over(unreachable, MAX_UNREACHABLE):
        return (
            f"no connection for {of(unreachable)}; {_proxies()}: check the way to the internet, a firewall, or set "
            "http_proxy and https_proxy"
        )
    if over(counts["timeout"], MAX_TIMEOUT):
        return (
            f"no answer in time for {of(counts['timeout'])}; a firewall or too much at once: lower --processes-count "
            "and --thread-count, or raise --timeout"
        )
    return None


def enough_trouble(num_urls: int) -> int:
    """How many failures that the resolver is to blame for say that it is unfit."""
    return max(_MIN_FAILURES, int(MAX_RESOLVER_TROUBLE * num_urls) + 1)


def count_resolver_trouble(failures: Iterable[tuple[str, str, str | None]], enough: int) -> int:
    """Of the (url, status, message) of class dns, how many the resolver is to blame for: it said so itself, or the
    host's name has an address when asked for again, alone. Counts no further than to `enough`."""
    trouble, by_host = 0, Counter()
    for url, status, message in failures:
        if classify(status, message) != "dns":
            continue
        if is_resolver_trouble(message):
            trouble += 1
        else:
            by_host[urllib.parse.urlsplit(url).hostname] += 1
    last_moment = time.monotonic() + _MAX_SECONDS
    for host, count in by_host.items():
        if trouble >= enough or time.monotonic() > last_moment:
            break
        trouble += count * _has_address_after_all(host)
    return trouble


def _has_address_after_all(host: str) -> bool:
    for _ in range(_LOOKUPS):
        try:
            socket.getaddrinfo(host, 80, type=socket.SOCK_STREAM)
            return True
        except (socket.gaierror, UnicodeError):
            time.sleep(_PAUSE_SECONDS)
    return False


def _resolvers() -> str:
    try:
        lines = Path("/etc/resolv.conf").read_text().splitlines()
    except OSError:
        return "/etc/resolv.conf cannot be read"
    servers = [line.split()[1] for line in lines if line.startswith("nameserver") and len(line.split()) > 1]
    return f"/etc/resolv.conf names {', '.join(servers) or 'no nameserver'}"


def _proxies() -> str:
    proxies = {name: url for name, url in urllib.request.getproxies().items() if name in ("http", "https")}
    return f"proxies in use: {', '.join(f'{k}={_without_password(v)}' for k, v in proxies.items()) or 'none'}"


def _without_password(url: str) -> str:
    return url.rpartition("@")[2]
