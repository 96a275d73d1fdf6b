"""Why a picture could not be had: img2dataset's messages sorted into classes.

img2dataset records `str(error)` of what urllib or its resizer raised. `classify` is the one place that reads those
words, so that folders made only by img2dataset are understood as well.
"""

import re
from collections import Counter
from collections.abc import Mapping

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
    "reset": (
        r"\[Errno (32|103|104)\]|Remote end closed|IncompleteRead|Connection reset",
        "the connection broke off",
    ),
    "too_large": (r"area too large|decompression bomb|too many bytes", "more pixels or bytes than allowed"),
    "too_small": (r"too small", "fewer pixels than --min-image-size"),
    "aspect": (r"aspect ratio", "longer than --max-aspect-ratio allows"),
    "hash": (r"hash mismatch", "not the file that the metadata names"),
    "decode": (r"(?i)decod|no known format", "not a picture, or a damaged one"),
    "other": (r"", "anything else"),
}
# Failures that another try may mend.
TEMPORARY = ("dns", "timeout", "deadline", "limited", "5xx", "reset", "refused", "unreachable", "tls", "proxy")
# Part of every account of a shard: a change of the classes must change it.
CLASSES_VERSION = 3
MEANINGS = {name: meaning for name, (_, meaning) in _CLASSES.items()}
CLASSES = tuple(MEANINGS)
_PATTERNS = {name: re.compile(pattern) for name, (pattern, _) in _CLASSES.items()}
# The resolver itself is in trouble (EAI_AGAIN); any other code of getaddrinfo says that the name has no address.
_RESOLVER_TROUBLE = re.compile(r"\[Errno -3\]|Temporary failure in name resolution")


def classify(status: str, message: str | None) -> str:
    """The class of a row by img2dataset's columns `status` and `error_message`; "success" where it has its picture."""
    if status == "success":
        return "success"
    name = next(name for name, pattern in _PATTERNS.items() if pattern.search(message or ""))
    return "decode" if name == "other" and status == "failed_to_resize" else name


def is_resolver_trouble(message: str) -> bool:
    """True where the resolver gave no answer, as opposed to the answer that there is no such name."""
    return bool(_RESOLVER_TROUBLE.search(message))


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
    """The account as a table."""
    lines = [f"{describe_rows(report)}, in {len(report['parts'])} part(s)"]
    return "\n".join(lines + describe_failures(report["failed"], report["rows"], report["examples"]))


def describe_rows(report: dict) -> str:
    rows = max(report["rows"], 1)
    pending = f", {report['pending']:,} still to be fetched" if report["pending"] else ""
    return (
        f"{report['success']:,} of {report['rows']:,} rows have their picture ({report['success'] / rows:.1%}), "
        f"{report['bytes'] / 1e6:,.1f} MB{pending}"
    )
