"""`ppldm demo-data --world shapes`: any number of drawn scenes with their captions, as parts that training reads.

    OUT/demo.filelist.list      what training takes; OUT/parts/ has its rows
    OUT/held_out.filelist.list  a tenth as many rows, each with a held-out pair of colour and shape
    OUT/prompts-seen.txt        captions of the kind that training has, each marked seen
    OUT/prompts-heldout.txt     captions with held-out pairs, each marked unseen
    OUT/tokenizer/              the vocabulary of the whole grammar in the language of the captions
    OUT/manifest.json           written last

Every row is a function of (seed, split, row): the first N rows are the same whatever the number of rows is, and each
part is written by itself, so that the same command goes on where it was stopped. The metadata of a row has the caption
of the next one as `wrong_caption`: a model trained with `--captions wrong_caption` cannot know what captions mean; and,
where captions are long, the row's own short one as `short_caption`.
"""

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from ...data.filelist import write_filelist
from ...data.formats.part import Part, write_part
from ...data.formats.row import Row
from ...utils.errors import ConfigError, PartError
from ...utils.files import make_output_dir, write_json, write_text
from ...utils.finished import JobFolder, finish, make_key
from ...utils.log import progress
from ...utils.processes.workers import check_workers, map_unordered
from ...utils.rng import MAX_SEED, Stream, make_rng
from .draw import Arrangement, arrange, draw_picture
from .grammar import LANGUAGES, MAX_OBJECTS, PAIRS, RELATIONS, SIZES, Group, Scene, all_scenes, draw_scene, make_caption
from .paragraphs import TEXTS, write_paragraph

ROWS_PER_PART = 4096
NUM_PROMPTS = 512
MAX_CAPTION_TOKENS = {"short": 32, "long": 192}  # the longest short one, in Chinese, has 26 with [CLS] and [SEP]
MIN_SIZE, MAX_SIZE = 32, 1024
_VERSION = 2  # of what is drawn: a change of it must change this
_SPLITS = {"demo": False, "held_out": True}  # filelist -> whether its rows are held out


@dataclass(frozen=True)
class World:
    """What decides each row. `size`: in pixels; `language`: of LANGUAGES, or "both"; `max_objects`: of a scene;
    `captions`: "short", or "long" (paragraphs.py), with the same pictures."""

    size: int
    language: str = "en"
    max_objects: int = MAX_OBJECTS
    seed: int = 0
    version: int = _VERSION
    captions: str = "short"

    def __post_init__(self):
        if not MIN_SIZE <= self.size <= MAX_SIZE:
            raise ConfigError(f"--size is {self.size}; the shapes world needs {MIN_SIZE} to {MAX_SIZE} pixels")
        if not 1 <= self.max_objects <= MAX_OBJECTS:
            raise ConfigError(f"--max-objects is {self.max_objects}; it must be from 1 to {MAX_OBJECTS}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"--seed is {self.seed}; it must be from 0 to 2^64 - 1")
        if self.captions == "long" and self.language != "en":
            raise ConfigError(f"--captions long is English; omit --language {self.language}, or take short captions")

    def settings(self) -> dict:
        """What decides its files, as older versions recorded it where captions are short."""
        return {name: value for name, value in asdict(self).items() if value != "short"}

    def draw(self, held_out: bool, row: int) -> tuple[Scene, str, np.ndarray]:
        """(scene, caption, picture uint8 [size, size, 3]) of a row."""
        rng = make_rng(self.seed, Stream.SHAPES_WORLD, int(held_out), row)
        scene, language = self._begin(rng, held_out)
        drawn = arrange(scene, rng)
        said = self._say(scene, language, lambda: drawn, int(held_out), row)
        return scene, said, draw_picture(scene, self.size, rng, drawn)

    def caption(self, held_out: bool, row: int) -> str:
        """That of a row, without its picture."""
        rng = make_rng(self.seed, Stream.SHAPES_WORLD, int(held_out), row)
        scene, language = self._begin(rng, held_out)
        return self._say(scene, language, partial(arrange, scene, rng), int(held_out), row)

    def _begin(self, rng: np.random.Generator, held_out: bool) -> tuple[Scene, str]:
        """(scene, language) of a row."""
        scene = draw_scene(rng, held_out, self.max_objects)
        return scene, LANGUAGES[rng.integers(len(LANGUAGES))] if self.language == "both" else self.language

    def _say(self, scene: Scene, language: str, arranged: Callable[[], Arrangement], split: int, row: int) -> str:
        """The caption; phrasings of a long one have random numbers of their own, so that pictures do not change."""
        caption = make_caption(scene, language)
        if self.captions == "short":
            return caption
        return write_paragraph(scene, caption, arranged(), make_rng(self.seed, Stream.SHAPES_WORLD, 4 + split, row))

    def prompts(self, held_out: bool, count: int) -> list[str]:
        """So many captions, no two of one scene where the grammar has enough, none of them of a row but by chance."""
        found = {}
        for number in range(20 * count):
            rng = make_rng(self.seed, Stream.SHAPES_WORLD, 2 + int(held_out), number)
            scene = draw_scene(rng, held_out, self.max_objects)
            language = LANGUAGES[number % len(LANGUAGES)] if self.language == "both" else self.language
            if (short := make_caption(scene, language)) not in found:
                found[short] = self._say(scene, language, partial(arrange, scene, rng), 2 + int(held_out), number)
            if len(found) == count:
                break
        return list(found.values())

    def words(self) -> list[str]:
        """Those of every caption of the grammar, whatever rows are drawn."""
        from ...data.text.tokenizer import count_words

        singles = [scene for scene in all_scenes() if len(scene.groups) == 1]
        group = Group(1, *PAIRS[0], SIZES[0])
        pairs = [Scene((group, group), relation) for relation in RELATIONS]
        languages = LANGUAGES if self.language == "both" else (self.language,)
        texts = [make_caption(scene, language) for scene in singles + pairs for language in languages]
        return sorted(count_words(texts + [TEXTS] * (self.captions == "long")))


@dataclass(frozen=True)
class _Task:
    """Rows [start, stop) of a split, as one part."""

    world: World
    path: Path
    held_out: bool
    start: int
    stop: int

    @property
    def record_path(self) -> Path:
        return self.path.parent.parent / ".shapes_world" / f"{self.path.name}.json"

    def rows(self) -> Iterator[Row]:
        for number in range(self.start, self.stop):
            scene, caption, picture = self.world.draw(self.held_out, number)
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "PNG")
            meta = {"key": f"{number:09}", "width": self.world.size, "height": self.world.size,
                    "wrong_caption": self.world.caption(self.held_out, number + 1)}  # fmt: skip
            meta |= {"short_caption": make_caption(scene, "en")} if self.world.captions == "long" else {}
            yield Row(caption, file.getvalue(), meta)


def make_shapes_world(out: Path, world: World, rows: int, num_workers: int = 0, redo: bool = False) -> dict:
    """Write `rows` rows, and what belongs to them, to the folder `out`; return the manifest. Raises ConfigError for a
    wrong number or, without `redo`, a world of other settings there; OutputError for other files."""
    from ...data.text.tokenizer import CaptionTokenizer, build_vocab

    if rows < 1:
        raise ConfigError(f"--rows is {rows}; it must be 1 or more")
    num_workers = check_workers(num_workers)
    settings = {"rows": rows, **world.settings()}
    clear = partial(shutil.rmtree, out / "parts", ignore_errors=True)
    with JobFolder(out, ".shapes_world", "shapes world").claimed(settings, redo, clear=clear):
        (out / "manifest.json").unlink(missing_ok=True)
        for name, held_out in _SPLITS.items():
            _write_split(out, name, world, held_out, -(-rows // 10) if held_out else rows, num_workers)
        for name, held_out, kind in (("seen", False, "seen"), ("heldout", True, "unseen")):
            lines = "".join(f"{prompt}\t{kind}\n" for prompt in world.prompts(held_out, NUM_PROMPTS))
            write_text(out / f"prompts-{name}.txt", lines)
        words = world.words()
        CaptionTokenizer(build_vocab(words), MAX_CAPTION_TOKENS[world.captions], seen=words).save(out / "tokenizer")
        manifest = {**settings, "held_out_rows": -(-rows // 10)}
        write_json(out / "manifest.json", manifest)
    return manifest


def _write_split(out: Path, name: str, world: World, held_out: bool, rows: int, num_workers: int) -> None:
    starts = range(0, rows, ROWS_PER_PART)
    make_output_dir(out / "parts")
    paths = [out / "parts" / f"{name}-{number:05}.gz" for number in range(len(starts))]
    tasks = [
        _Task(world, path, held_out, start, min(start + ROWS_PER_PART, rows))
        for path, start in zip(paths, starts, strict=True)
    ]
    with progress(total=rows, desc=f"draw {name}", unit="row") as bar:
        for task, _ in map_unordered(_make_part, tasks, num_workers):
            bar.update(task.stop - task.start)
    write_filelist(out / f"{name}.filelist", [f"parts/{path.name}" for path in paths])
    write_filelist(out / f"{name}.filelist.list", [f"{name}.filelist"])


def _make_part(task: _Task) -> dict:
    settings = {**task.world.settings(), "held_out": task.held_out, "start": task.start, "stop": task.stop}
    key = make_key(settings, [], task.record_path)

    def write() -> dict:
        index = write_part(task.path, task.rows())
        return {"rows": len(index.offsets), "bytes": index.part_bytes, "crc32": index.part_crc32}

    def is_whole(record: dict) -> bool:
        with suppress(PartError):
            summary = Part.summarize(task.path)
            return summary is not None and summary.rows == record["rows"]
        return False

    return finish(task.record_path, key, is_whole, write)[0]
