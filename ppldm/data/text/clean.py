"""Captions from web pages, cleaned as those of CC12M are before training: lower case, without what no picture shows.

What goes: web addresses, HTML, @names, Chinese, Japanese and Korean characters, network addresses, numbers of articles
and other codes, file names, words of shops (free shipping, click here), sizes in pixels, and punctuation that is left
over. Dashes and quotation marks become plain ones. All of it is done twice, for what goes may uncover more.
"""

import html
import re
from urllib.parse import unquote_plus

_FILES = "png|jpe?g|bmp|webp|eps|pdf|apk|mp4"

# In this order: what to find, what to put in its place. The text is in lower case.
_STEPS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("<person>", "person"),  # what CC12M has in place of names
        (r"(?:https?:/{1,3}|www\.)\S+", " "),
        (r"(?<![\w.-])[\w.-]+\.(?:com?|ru|net|org|edu|gov|it)\b[\w/-]*", " "),
        (r"<[a-z/!][^<>]*>", " "),
        (r"@\w+", " "),
        ("[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]+", " "),
        ("[\u2010-\u2015\u2212\u2043\u2e3a\u2e3b\u30a0\ufe58\ufe63]", "-"),
        ("[`\u00b4\u00ab\u00bb\u201c-\u201f\u00a8]", '"'),
        ("[\u2018-\u201b]", "'"),
        (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", " "),
        (r"\d:\d\d\s*$", " "),
        (r"#\d{1,3}\b|#\d{5,}\b|\b\d{6,}\b", " "),
        (rf"(?<!\S)\S+\.(?:{_FILES})\b", " "),
        (r"[\"']{2,}", '"'),
        (r"\.{2,}", " "),
        (r"[][#®•©™&@·º½¾¿¡§~(){}|\\/*]+", " "),
        (r"\s\.\s", " "),
        # Codes: jc6640, jc6640vc, 6640vc231, j2d1a2a.
        (r"\b(?:[a-z]{1,3}\d{3,15}|[a-z]+\d+[a-z]+|\d+[a-z]+\d+|\d*[a-z]+\d+[a-z]+\d+[a-z\d]*)\b", " "),
        (r"\b(?:worldwide\s+)?(?:free\s+)?shipping\b", " "),
        (r"\b(?:free\s+)?download(?:\s+free)?\b", " "),
        (r"\bclick\s+(?:for|on)\s+\w+", " "),
        (rf"\b(?:{_FILES})(?:\s+images?)?\b", " "),
        (r"\bpage\s+\d+\b", " "),
        (r"\b\d+(?:\.\d+)?[x\u0445×]\d+(?:\.\d+)?\b", " "),
        (r"\s+:\s+", ": "),
        (r"\s+,", ","),
        (r"(\D[,.])\b", r"\1 "),
        (r"\s+", " "),
    )
]
_JOINED_WORDS = 3  # more hyphens and underscores than these join the words of a file's name
_ENDS = re.compile(r"^[\s'_,:;-]+|[\s'_,:+-]+$")
_QUOTED = re.compile(r"^[\"'](.+)[\"']$", re.DOTALL)


def clean_caption(caption: str) -> str:
    """The caption, cleaned; "" where nothing is left."""
    return _clean(_clean(caption))


def _clean(caption: str) -> str:
    text = html.unescape(html.unescape(unquote_plus(caption))).lower()
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    if sum(map(text.count, "-_")) > _JOINED_WORDS:
        text = re.sub(r"[-_\s]+", " ", text)
    return _ENDS.sub("", _QUOTED.sub(r"\1", text.strip()))
