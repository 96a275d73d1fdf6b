"""What an emoji is called, as a caption that reads like words.

The names are those of the `emoji` package, which takes them from Unicode (CLDR). The rule, applied in this order:

1. The colons go: ":red_circle:" becomes "red circle".
2. English: underscores become spaces, the typographic apostrophe a plain one.
   Chinese, where an underscore sets words apart that are not written together: it becomes a comma.
3. Commas set off every skin tone: "handshake, dark skin tone, light skin tone", "握手，较深肤色，较浅肤色".
4. Flags, which Unicode names by the place alone, become "flag of Norway" and "挪威的旗帜".
Gender words stay as they are: "man pilot", "woman pilot".
"""

import re

LANGUAGES = ("en", "zh")
_SKIN_TONE = {
    "en": re.compile(r"((?:medium-light|medium-dark|light|medium|dark) skin tone)"),
    "zh": re.compile(r"((?:较浅|中等浅|中等深|中等|较深)肤色)"),
}
_FLAG_OF_PLACE = re.compile("[\U0001f1e6-\U0001f1ff]{2}|\U0001f3f4[\U000e0020-\U000e007f]+")


def make_caption(emoji: str, name: str, language: str) -> str:
    """The caption of an emoji whose name in `language` is `name`, with or without colons."""
    space, comma, flag = (" ", ", ", "flag of {}") if language == "en" else ("，", "，", "{}的旗帜")
    text = name.strip(":").replace("_", space).replace("’", "'")
    pieces = (piece.strip(" ，") for piece in _SKIN_TONE[language].split(text))
    caption = comma.join(filter(None, pieces))
    return flag.format(caption) if _FLAG_OF_PLACE.fullmatch(emoji) else caption
