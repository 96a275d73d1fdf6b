"""`--block_list`: the URLs and the files that must not be in a data set, at whatever stage they are met.

A line is a URL, http://… or https://…, compared letter by letter, or `sha256:` and the 64 hexadecimal digits of a
picture's file. Empty lines and those that begin with # say nothing. A list may be a *.gz, and lie in a store.
"""

import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from ..utils.checksums import digest_of
from ..utils.errors import ConfigError
from ..utils.store.cache import input_path

BlockLists = Annotated[str, {"opt": True, "nargs": "+"}]
# The reason under which rows on a list are counted, and how its messages begin.
BLOCKED = "blocked"
_HASH = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)
_URL = re.compile(r"https?://\S", re.IGNORECASE)


@dataclass(frozen=True)
class BlockList:
    """`hashes`: SHA-256 in lower-case hexadecimal digits."""

    urls: frozenset[str] = frozenset()
    hashes: frozenset[str] = frozenset()

    def names(self, url: object, *hashes: object) -> bool:
        """Whether a picture of this URL, or of one of these hashes, is on the list. What is no text is not."""
        texts = {one for one in hashes if isinstance(one, str)}
        return (isinstance(url, str) and url in self.urls) or not self.hashes.isdisjoint(texts)

    @cached_property
    def settings(self) -> dict[str, str]:
        """For the key of what is made by the list: a digest of its entries; nothing for an empty list."""
        entries = sorted(self.urls), sorted(self.hashes)
        return {"block_list": digest_of(entries)} if any(entries) else {}


NOTHING = BlockList()


def read_block_list(files: Sequence[str] | str | None) -> BlockList:
    """What the files name together; nothing for no file. Raises ConfigError, StoreError."""
    urls, hashes = set(), set()
    for name in [files] if isinstance(files, str) else files or ():
        for number, line in enumerate(read_lines("--block-list", name), 1):
            entry = line.strip()
            if found := _HASH.fullmatch(entry):
                hashes.add(found[1].lower())
            elif _URL.match(entry):
                urls.add(entry)
            elif entry and not entry.startswith("#"):
                raise ConfigError(
                    f"--block-list: line {number} of {name} is not like http://… or sha256:64-hexadecimal-digits"
                )
    if files and not urls | hashes:
        raise ConfigError("--block-list names nothing; give files with a URL or sha256:HEX a line")
    return BlockList(frozenset(urls), frozenset(hashes))


def read_lines(flag: str, name: str) -> list[str]:
    """The lines of a text file that a flag names; only a line feed ends one. Raises ConfigError, StoreError."""
    try:
        path = input_path(name)
        packed = path.read_bytes()
        text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag}: cannot read {name} ({problem}); name a text file, or one by gzip") from error
    return text.split("\n")
