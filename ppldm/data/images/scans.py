"""How often a JPEG file goes over its pixels. Each scan of a few bytes costs a pass over all of them, and a file may
hold any number, so that 2 MB take minutes to decode. Encoders write about ten; libjpeg-turbo advises readers to stop at
500."""

import re

from ...utils.errors import RowError

_MAX_SCANS = 500
# So many are taken of any size, and more as long as scans x pixels, the passes, stay within this.
_FEW_SCANS, _MAX_PASSES = 64, 2_000_000_000
_START, _SCAN, _END = b"\xff\xd8\xff", b"\xff\xda", 0xD9
# Within pixels, FF 00 is a byte of them, and FF D0 to FF D7 stand between them.
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = (0x01, 0xD8)


def check_scans(image: bytes) -> None:
    """Raises RowError "image" for a JPEG file of more scans than any encoder writes; other files are let through."""
    if image.startswith(_START) and image.count(_SCAN) > _FEW_SCANS:
        scans, pixels = _count_scans(image)
        if scans > _MAX_SCANS or (scans > _FEW_SCANS and scans * pixels > _MAX_PASSES):
            raise RowError("image", f"the image cannot be decoded ({scans:,} scans of {pixels:,} pixels)")


def _count_scans(jpeg: bytes) -> tuple[int, int]:
    """(scans, pixels) up to the end of the picture; what cameras put behind it may look like scans."""
    place, scans, pixels = 2, 0, 0
    while found := _MARKER.search(jpeg, place):
        marker, place = found[1][0], found.end()
        if marker == _END:
            break
        if marker in _FRAMES:
            height, width = (int.from_bytes(jpeg[at : at + 2], "big") for at in (place + 3, place + 5))
            pixels = max(pixels, height * width)
        scans += marker == _SCAN[1]
        if marker not in _WITHOUT_LENGTH:
            place += max(2, int.from_bytes(jpeg[place : place + 2], "big"))
    return scans, pixels
