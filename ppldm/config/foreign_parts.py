"""Where other trainers say that their data lie, as lines of a filelist; and their filters of control images."""

import re
from pathlib import Path

from ..utils.store.client import check_address, is_address

_MOST_PARTS = 1_000_000
_PIPE = re.compile(r"pipe: *(?:aws s3 cp|gsutil (?:cp|cat)|curl(?: -\S+)*|hdfs dfs -cat) +(?P<address>\S+)(?: +-)?")

# By the class of a filter of control images: ours, and of its parameters the names here.
_FILTERS = {
    "CannyFilter": ("canny", {"resize": ("resize",)}),
    **dict.fromkeys(("SRFilter", "SREffnetFilter"), ("super-resolution", {"scale_factor": ("scale",)})),
    "InpaintFilter": (
        "inpainting", {"thresold": ("threshold_low", "threshold_high"), "p_outpaint": ("p_outpaint",)}
    ),
}  # fmt: skip


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


def control_filter(config: dict) -> str:
    """What `--control` means the same as the filter in a config of Stable Cascade's trainer. Raises NoCounterpart."""
    name, given = config.get("controlnet_filter"), config.get("controlnet_filter_params") or {}
    ours, names = _FILTERS.get(name, (None, {}))
    if ours is None or given.keys() - names.keys():
        shown = ", ".join([str(name), *sorted(given.keys() - names.keys())])
        raise NoCounterpart(f"{shown} is not a filter here; make one of your own: model.control package.module:Class")
    values = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
    pairs = [pair for key in given for pair in zip(names[key], values[key], strict=False)]
    return ",".join([ours, *(f"{key}={value}" for key, value in pairs)])
