"""Where other trainers say that their data lie, as lines of a filelist."""

import re
from pathlib import Path

from ..utils.store.client import check_address, is_address

_MOST_PARTS = 1_000_000
_PIPE = re.compile(r"pipe: *(?:aws s3 cp|gsutil (?:cp|cat)|curl(?: -\S+)*|hdfs dfs -cat) +(?P<address>\S+)(?: +-)?")


class NoCounterpart(Exception):
    """A value that cannot be translated; its text is the reason."""


def expand_braces(text: str) -> list[str]:
    """The paths of a pattern such as a/{000..012}.tar, as WebDataset writes them, and of {a,b}."""
    found = re.search(r"\{([^{}]*)\}", text)
    if not found:
        return [text]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found.group(1))
    if span:
        first, last = span.groups()
        if int(last) - int(first) >= _MOST_PARTS:
            raise NoCounterpart(f"{text} names more than {_MOST_PARTS:,} files; write the filelist yourself")
        middle = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    else:
        middle = found.group(1).split(",")
    head, tail = text[: found.start()], text[found.end() :]
    return [f"{head}{one}{rest}" for one in middle for rest in expand_braces(tail)]


def places_of(text: str) -> list[str]:
    """The lines of a filelist that mean the same. A pipe whose command only copies an address is that address; a folder
    of a store is the tar files below it."""
    copied = _PIPE.fullmatch(text.strip())
    place = copied["address"] if copied else text
    if is_address(place):
        return [check_address(one if "." in one.rpartition("/")[2] else f"{one.rstrip('/')}/**/*.tar")
                for one in expand_braces(place)]  # fmt: skip
    if place.startswith("pipe:") or "://" in place.replace("file://", ""):
        raise NoCounterpart(f"{place} cannot be read here: mount it or copy it, and write a filelist of the parts")
    return [str(Path(one).absolute()) for one in expand_braces(re.sub("^file:(//)?", "", place))]
