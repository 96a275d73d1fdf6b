"""Pictures with words under them, and where they are written; how one is resized where that is a matrix."""

import io
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from .files import atomic_write
from .log import get_logger
from .text import NOT_UTF8

_CJK_FAMILIES = ("Noto Sans CJK", "Source Han Sans", "WenQuanYi", "Droid Sans Fallback", "SimHei", "Microsoft YaHei")
TITLE_HEIGHT, _TITLE_MARGIN = 22, 6
_ORDINARY_STYLES = ("Regular", "Book", "Normal", "Medium")


def caption_font(size: int = 14, text: str = ""):
    """DejaVu Sans, which matplotlib ships; for a text with Chinese, Japanese or Korean one that has these characters,
    where the machine has it."""
    import matplotlib

    own = str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"))
    return ImageFont.truetype((any(c >= "\u2e80" for c in text) and _cjk_font()) or own, size)


@lru_cache(maxsize=1)
def _cjk_font() -> str | None:
    # Not matplotlib's list of fonts, which is as old as its cache.
    from matplotlib.font_manager import findSystemFonts

    found = find_face(_CJK_FAMILIES, findSystemFonts())
    if found is None:
        get_logger().warning(
            "no font with Chinese characters is installed, so boxes stand for them; on Debian and Ubuntu: "
            "sudo apt install fonts-noto-cjk"
        )
    return found


def find_face(families: tuple[str, ...], files: Iterable[str]) -> str | None:
    """Of font files the one of the first family (by the beginning of its name) that there is, upright and of ordinary
    weight if possible; None where no family is there."""
    found = []
    for path in files:
        try:
            family, style = ImageFont.truetype(path, 10).getname()
        except OSError:
            continue  # not a font that FreeType reads
        for rank, known in enumerate(families):
            if (family or "").startswith(known):
                found.append((rank, style not in _ORDINARY_STYLES, family, path))
    return min(found)[-1] if found else None


def fit_text(text: str, font, width: int) -> str:
    """The text, cut and ended by an ellipsis where it is over `width` pixels wide."""
    if font.getlength(text) <= width:
        return text
    fits, limit = 0, len(text)  # letters before the ellipsis
    while fits < limit:
        tried = (fits + limit + 1) // 2
        fits, limit = (tried, limit) if font.getlength(text[:tried] + "…") <= width else (fits, tried - 1)
    return text[:fits] + "…"


def wrap_text(text: str, font, width: int, max_lines: int) -> list[str]:
    """The words of a text in lines at most `width` pixels wide; the last line takes the rest, cut by an ellipsis."""
    lines, words = [], text.split()
    while words and len(lines) < max_lines - 1:
        taken = 1
        while taken < len(words) and font.getlength(" ".join(words[: taken + 1])) <= width:
            taken += 1
        lines.append(fit_text(" ".join(words[:taken]), font, width))
        words = words[taken:]
    return lines + ([fit_text(" ".join(words), font, width)] if words else [])


def with_title(picture: np.ndarray, title: str) -> np.ndarray:
    """[H, W, 3] uint8 with a line of text above it, on white; at least as wide as the text."""
    font = caption_font(14, title)
    width = max(picture.shape[1], int(font.getlength(title)) + 2 * _TITLE_MARGIN)
    canvas = Image.new("RGB", (width, picture.shape[0] + TITLE_HEIGHT), "white")
    ImageDraw.Draw(canvas).text((_TITLE_MARGIN, 3), title, fill="black", font=font)
    canvas.paste(Image.fromarray(picture), (0, TITLE_HEIGHT))
    return np.asarray(canvas)


def save_png(path, image, texts: dict[str, str] | None = None) -> None:
    """Write a PIL image or an [H, W, 3] uint8 array as PNG, atomically. `texts` by keyword go into the file."""
    with atomic_write(path) as file:
        file.write(as_png(image, texts))


def as_png(image, texts: dict[str, str] | None = None) -> bytes:
    """The content of such a file."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    info = PngInfo()
    for keyword, text in (texts or {}).items():
        info.add_itxt(keyword, text.encode(errors=NOT_UTF8).decode())
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def bicubic_filter(old: int, new: int) -> np.ndarray:
    """float32 [new, old]: Pillow's bicubic filter along one axis, which is that of PyTorch with `antialias`."""
    rows = Image.fromarray(np.eye(old, dtype=np.float32)).resize((old, new), Image.Resampling.BICUBIC)
    return np.asarray(rows)
