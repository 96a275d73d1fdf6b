"""Why a picture could not be had: img2dataset's messages sorted into classes; and whether it is the network that fails.

img2dataset records `str(error)` of what urllib or its resizer raised. `classify` is the one place that reads those
words, so that folders made only by img2dataset are understood as well.

Of the links of an old data set a fifth or more are dead. A resolver that gives up under load, a proxy or certificates
that are missing look the same in a table of failures, but cost half of the data in silence. Yet a dead host's name does
not come back when asked for again, and sites refuse one by one. So each host has one vote, divided among its URLs.
"""

import re
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .fetch import host_of

# Of each class: what its messages look like, and what it means. The first that fits is taken.
_CLASSES = {
    "blocked": (r"^blocked: ", "on the block list"),
    "opt_out": (r"X-Robots-Tag", "the site forbids the use (X-Robots-Tag)"),
    "proxy": (r"HTTP Error 407|Tunnel connection failed", "the proxy refuses"),
    "redirect": (r"HTTP Error 3\d\d", "redirects that lead nowhere"),
    "limited": (r"HTTP Error 42[59]", "the host asks for fewer requests"),
    "4xx": (r"HTTP Error 4(?!08)\d\d", "the link is dead or forbidden"),
    "5xx": (r"HTTP Error 5\d\d", "the site is broken or overloaded"),
    "deadline": (r"^(<urlopen error )?deadline", "too slow: the time of the URL or of its shard was over"),
    "bad_url": (
        r"unknown url type|no host given|control characters|codec can't encode|nonnumeric port|IPv6 URL"
        r"|label (empty|too)|'NoneType'|not a URL",
        "no URL that a browser would take",
    ),
    "private": (r"private address", "an address of a private network; --no-refuse-private allows these"),
    "empty": (r"^empty answer", "an answer without a picture"),
    "dns": (
        r"\[Errno -\d+\]|name resolution|Name or service not known|No address associated|getaddrinfo",
        "the host's name has no address",
    ),
    "timeout": (r"timed out|\[Errno 110\]|HTTP Error 408", "no answer in time"),
    "tls": (r"(?i)\bssl\b|certificate|TLSV1", "no trusted connection"),
    "refused": (r"\[Errno 111\]", "the host refuses connections"),
    "unreachable": (r"\[Errno (99|101|112|113)\]", "no way to the host"),
    "reset": (r"\[Errno (32|103|104)\]|Remote end closed|IncompleteRead|Connection reset", "the connection broke off"),
    "too_large": (r"area too large|decompression bomb|too many bytes", "more pixels or bytes than allowed"),
    "too_small": (r"too small", "fewer pixels than --min-image-size"),
    "aspect": (r"aspect ratio", "longer than --max-aspect-ratio allows"),
    "hash": (r"hash mismatch", "not the file of --verify-hash"),
    "decode": (r"(?i)decod|no known format", "not a picture, or a damaged one"),
    "other": (r"", "anything else"),
}
# Failures that another try may mend.
TEMPORARY = ("dns", "timeout", "deadline", "limited", "5xx", "reset", "refused", "unreachable", "tls", "proxy")
CLASSES_VERSION = 3  # part of every account of a shard: a change of the classes must change it
MEANINGS = {name: meaning for name, (_, meaning) in _CLASSES.items()}
CLASSES = tuple(MEANINGS)
_PATTERNS = {name: re.compile(pattern) for name, (pattern, _) in _CLASSES.items()}
# The resolver itself is in trouble (EAI_AGAIN); any other code of getaddrinfo says that the name has no address.
_RESOLVER_TROUBLE = re.compile(r"\[Errno -3\]|Temporary failure in name resolution")
# Shares of the votes above which the network is at fault, well above what dead links of the web cause.
MAX_RESOLVER_TROUBLE, MAX_DNS, MAX_TLS, MAX_PROXY, MAX_UNREACHABLE, MAX_TIMEOUT = 0.05, 0.3, 0.2, 0.05, 0.3, 0.5
_MIN_HOSTS = 8  # fewer prove nothing
_NETWORK_CLASSES = ("dns", "tls", "proxy", "unreachable", "refused", "timeout")
_USER = re.compile(r"(?<=//)[^/?#]*@")
_LOOKUPS, _PAUSE_SECONDS, _MAX_SECONDS = 3, 0.2, 60


def classify(status: str, message: str | None) -> str:
    """The class of a row by img2dataset's columns `status` and `error_message`; "success" where it has its picture."""
    if status == "success":
        return "success"
    name = next(name for name, pattern in _PATTERNS.items() if pattern.search(message or ""))
    return "decode" if name == "other" and status == "failed_to_resize" else name


def describe_failures(failed: Mapping[str, int], num_rows: int, examples: Mapping[str, str]) -> list[str]:
    """A table of failures, the most frequent first: count, share of all rows, class, its meaning, an example."""
    return [
        f"  {count:>9,}  {count / num_rows:6.1%}  {name:<12}{MEANINGS[name]}"
        + (f"; {examples[name]}" if name in examples else "")
        for name, count in sorted(failed.items(), key=lambda item: (-item[1], item[0]))
    ]


def merge_reports(reports: list[dict]) -> dict:
    """The account of all parts. rows = success + the sum of failed + pending."""
    failed, examples = Counter(), {}
    for report in reports:
        failed.update(report["failed"])
        examples = report["examples"] | examples
    sums = {
        name: sum(report[name] for report in reports)
        for name in ("rows", "success", "pending", "retried", "bytes", "shards", "unfinished_shards", "shard_seconds")
    }
    return sums | {"failed": dict(sorted(failed.items())), "examples": examples, "parts": reports}


def describe_report(report: dict) -> str:
    lines = describe_failures(report["failed"], report["rows"], report["examples"])
    return "\n".join([f"{describe_rows(report)}, in {len(report['parts'])} part(s)", *lines])


def describe_rows(report: dict) -> str:
    rows = max(report["rows"], 1)
    pending = f", {report['pending']:,} still to be fetched" if report["pending"] else ""
    return (
        f"{report['success']:,} of {report['rows']:,} rows have their picture ({report['success'] / rows:.1%}), "
        f"{report['bytes'] / 1e6:,.1f} MB{pending}"
    )


@dataclass(frozen=True)
class Outcome:
    """What became of one URL, in img2dataset's words."""

    url: str | None
    status: str
    message: str | None

    @cached_property
    def name(self) -> str:
        return classify(self.status, self.message)

    @cached_property
    def host(self) -> str:
        return host_of(self.url or "")


def without_password(url: str) -> str:
    """A URL without the name and the password before its host."""
    return _USER.sub("", url)


def find_network_fault(outcomes: Sequence[Outcome], ask_again: bool = False) -> str | None:
    """What is wrong with the network and the remedy, in one line, or None. With `ask_again`, names without address are
    looked up once more, for up to a minute, and URLs of a few hosts that all fail are taken for a fault too."""
    urls_of = Counter(outcome.host for outcome in outcomes)
    votes = Counter()
    for outcome in outcomes:
        votes[outcome.name] += 1 / urls_of[outcome.host]
    trouble = _count_resolver_trouble(outcomes, urls_of, ask_again)

    def over(number: float, share: float) -> bool:
        return number >= _MIN_HOSTS and number > share * len(urls_of)

    def of(number: float) -> str:
        return f"{number:.0f} of {len(urls_of)} hosts ({number / len(urls_of):.0%})"

    unreachable = votes["unreachable"] + votes["refused"]
    if over(trouble, MAX_RESOLVER_TROUBLE) or over(votes["dns"], MAX_DNS):
        blame = f", at least {trouble:.0f} of them because the resolver fails" if trouble >= 1 else ""
        return (
            f"DNS: look-ups fail for {of(votes['dns'])}{blame}; {_resolvers()}; run a caching resolver on this machine "
            "(sudo apt install knot-resolver or unbound, then nameserver 127.0.0.1 in /etc/resolv.conf), or without "
            "root ask for less at once: fewer --processes-count and --thread-count"
        )
    if over(votes["tls"], MAX_TLS):
        return (
            f"TLS: certificates are not trusted for {of(votes['tls'])}; set the clock, install ca-certificates or "
            'export SSL_CERT_FILE="$(python -m certifi)"; behind a proxy that opens TLS, name its certificate there; '
            "or go on with --ignore-ssl-certificate"
        )
    if over(votes["proxy"], MAX_PROXY):
        return f"the proxy refuses {of(votes['proxy'])} ({_proxies()}); mend http_proxy and https_proxy"
    if over(unreachable, MAX_UNREACHABLE):
        return (
            f"no connection for {of(unreachable)}; {_proxies()}: check the way to the internet, a firewall, or set "
            "http_proxy and https_proxy"
        )
    if over(votes["timeout"], MAX_TIMEOUT):
        return (
            f"no answer in time for {of(votes['timeout'])}; a firewall or too much at once: lower --processes-count "
            "and --thread-count, or raise --timeout"
        )
    failing = sum(outcome.name in _NETWORK_CLASSES for outcome in outcomes)
    if ask_again and failing == len(outcomes) >= _MIN_HOSTS:
        example = f"{without_password(outcomes[0].url)} ({outcomes[0].message})"
        return (
            f"not one of {failing} URLs can be reached, for example {example}; "
            f"{_resolvers()}, {_proxies()}: check the way to the internet; or all the hosts are gone: --preflight 0"
        )
    return None


def _count_resolver_trouble(outcomes: Iterable[Outcome], urls_of: Counter, ask_again: bool) -> float:
    """The votes of those of class dns that the resolver is to blame for: it said so itself, or the name has an address
    when asked for again, alone. Counts no further than needed."""
    failed = [outcome for outcome in outcomes if outcome.name == "dns"]
    admitted = [outcome.host for outcome in failed if _RESOLVER_TROUBLE.search(outcome.message)]
    trouble = sum((1 / urls_of[host] for host in admitted), 0.0)
    hosts = Counter(outcome.host for outcome in failed) - Counter(admitted)
    last_moment = time.monotonic() + _MAX_SECONDS
    enough = max(_MIN_HOSTS, MAX_RESOLVER_TROUBLE * len(urls_of) + 1)
    for host, count in hosts.items() if ask_again else ():
        if trouble >= enough or time.monotonic() > last_moment:
            break
        for _ in range(_LOOKUPS):
            try:
                socket.getaddrinfo(host, 80, type=socket.SOCK_STREAM)
                trouble += count / urls_of[host]
                break
            except (socket.gaierror, UnicodeError):
                time.sleep(_PAUSE_SECONDS)
    return trouble


def _resolvers() -> str:
    try:
        lines = Path("/etc/resolv.conf").read_text().splitlines()
    except OSError:
        return "/etc/resolv.conf cannot be read"
    servers = [line.split()[1] for line in lines if line.startswith("nameserver") and len(line.split()) > 1]
    return f"/etc/resolv.conf names {', '.join(servers) or 'no nameserver'}"


def _proxies() -> str:
    # What follows the last @: the password itself may hold one, or a slash.
    hosts = {name: url.rpartition("@")[2] for name, url in urllib.request.getproxies().items()}
    used = [f"{name}={hosts[name]}" for name in ("http", "https") if name in hosts]
    return f"proxies in use: {', '.join(used) or 'none'}"
