"""Every message that urllib and img2dataset's resizer leave behind has its class, and counts add up."""

from pathlib import Path

import pytest

from ppldm.prepare.download.failures import (
    CLASSES,
    TEMPORARY,
    classify,
    describe_failures,
    merge_reports,
)

MESSAGES = {
    "Use of image disallowed by X-Robots-Tag directive": "opt_out",
    "HTTP Error 407: Proxy Authentication Required": "proxy",
    "<urlopen error Tunnel connection failed: 403 Forbidden>": "proxy",
    "HTTP Error 302: The HTTP server returned a redirect error that would lead to an infinite loop.": "redirect",
    "HTTP Error 404: Not Found": "4xx",
    "HTTP Error 429: Too Many Requests": "limited",
    "HTTP Error 425: Too Early": "limited",
    "HTTP Error 408: Request Timeout": "timeout",
    "HTTP Error 410: Gone": "4xx",
    "empty answer (HTTP status 204)": "empty",
    "<urlopen error private address 127.0.0.1, which a list from the web must not reach>": "private",
    "cannot decode Content-Encoding br, which was not asked for": "decode",
    "not a URL: Port out of range 0-65535": "bad_url",
    "HTTP Error 503: Service Unavailable": "5xx",
    "deadline: the time of the URL was over": "deadline",
    "<urlopen error deadline: the time of the URL was over>": "deadline",
    "<urlopen error [Errno -2] Name or service not known>": "dns",
    "<urlopen error [Errno -3] Temporary failure in name resolution>": "dns",
    "<urlopen error [Errno -5] No address associated with hostname>": "dns",
    "<urlopen error timed out>": "timeout",
    "The read operation timed out": "timeout",
    "<urlopen error _ssl.c:989: The handshake operation timed out>": "timeout",
    "<urlopen error [Errno 110] Connection timed out>": "timeout",
    "<urlopen error [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired>": "tls",
    "<urlopen error [SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)>": "tls",
    "<urlopen error [Errno 111] Connection refused>": "refused",
    "<urlopen error [Errno 113] No route to host>": "unreachable",
    "<urlopen error [Errno 101] Network is unreachable>": "unreachable",
    "[Errno 104] Connection reset by peer": "reset",
    "Remote end closed connection without response": "reset",
    "IncompleteRead(1079 bytes read, 98921 more expected)": "reset",
    "unknown url type: 'nonsense'": "bad_url",
    "<urlopen error no host given>": "bad_url",
    "URL can't contain control characters. '/a b' (found at least ' ')": "bad_url",
    "too many bytes in one answer": "too_large",
    "hash mismatch": "hash",
    "something nobody has seen": "other",
    None: "other",
}
RESIZE_MESSAGES = {
    "image too small": "too_small",
    "image too small (3 x 4)": "too_small",
    "image area too large": "too_large",
    "the image cannot be decoded (Image size (4128062500 pixels) exceeds limit of 178956970 pixels, could be "
    "decompression bomb DOS attack.)": "too_large",
    "aspect ratio too large": "aspect",
    "Image decoding error": "decode",
    "the image is of no known format (JPEG, PNG, WEBP, GIF, BMP)": "decode",
    "OpenCV(4.11.0) error: (-215:Assertion failed)": "decode",
}


@pytest.mark.parametrize("message, name", MESSAGES.items())
def test_messages_of_fetching(message, name):
    assert classify("failed_to_download", message) == name
    assert name in CLASSES


@pytest.mark.parametrize("message, name", RESIZE_MESSAGES.items())
def test_messages_of_resizing(message, name):
    assert classify("failed_to_resize", message) == name


def test_success_has_no_failure():
    assert classify("success", None) == "success"
    assert set(TEMPORARY) < set(CLASSES)


def test_the_table_starts_with_the_most_frequent():
    lines = describe_failures({"4xx": 3, "dns": 12}, 100, {"dns": "x (http://y)"})
    assert [line.split()[2] for line in lines] == ["dns", "4xx"]
    assert "12.0%" in lines[0] and lines[0].endswith("x (http://y)")


def test_reports_of_parts_add_up():
    part = {
        "rows": 5, "success": 2, "failed": {"dns": 1, "4xx": 1}, "pending": 1, "retried": 0, "examples": {"dns": "a"},
        "bytes": 10, "shards": 1, "unfinished_shards": 1, "shard_seconds": 0.5,
    }  # fmt: skip
    whole = merge_reports([part, part | {"failed": {"4xx": 2}}])
    assert whole["rows"] == whole["success"] + sum(whole["failed"].values()) + whole["pending"] == 10
    assert whole["failed"] == {"4xx": 3, "dns": 1}


def test_the_docs_name_every_class_and_those_that_another_try_may_mend():
    text = (Path(__file__).resolve().parents[3] / "docs/laion.md").read_text(encoding="utf-8")
    table = text[text.index("| class | meaning |") : text.index("--retry-failed --only")]
    assert all(f"`{name}`" in table for name in CLASSES)
    assert ", ".join(f"`{name}`" for name in TEMPORARY) in " ".join(text.split())
