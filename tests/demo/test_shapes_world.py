"""Laws of the shapes world: a caption says its scene exactly; pictures keep it; no row shows a held-out pair."""

import itertools
import json
import os
import random
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelists import read_filelist

from ppldm.data.filelist import read_filelist_list
from ppldm.data.formats.part import Part
from ppldm.data.images import decode_pixels
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.demo.openmoji import demo_data
from ppldm.demo.shapes_world import write
from ppldm.demo.shapes_world.draw import BORDER, EXTENTS, GAP, arrange, coverage, draw_picture, place_objects
from ppldm.demo.shapes_world.grammar import (
    COLOURS,
    HELD_OUT,
    LANGUAGES,
    PARAGRAPHS,
    POSITIONS,
    RELATIONS,
    SHAPES,
    Group,
    Scene,
    all_scenes,
    draw_scene,
    lies,
    make_caption,
    parse_caption,
    shorten,
)
from ppldm.demo.shapes_world.paragraphs import MAX_WORDS
from ppldm.demo.shapes_world.write import World, make_shapes_world
from ppldm.utils.errors import ConfigError, DataError, OutputError

SEED = int(os.environ.get("PPLDM_SEED", 1))
WORLD = World(32, "both", seed=SEED)
LONG, SHORT = (World(32, seed=SEED, captions=captions) for captions in ("long", "short"))


def read_rows(folder: Path, name: str = "demo") -> list:
    lists = read_filelist_list(folder / f"{name}.filelist.list")
    parts = [Part(path) for item in lists for path in read_filelist(item.path)]
    return [part.read(row) for part in parts for row in range(len(part))]


def read_tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".shapes_world" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def make_rng(number: int = 0) -> np.random.Generator:
    return np.random.default_rng([SEED, number])


# -- grammar and captions


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_caption_says_its_scene_and_no_other(language):
    scenes = list(all_scenes())
    assert len(set(scenes)) == len(scenes) == 52_416
    captions = {}
    for scene in scenes if language == "zh" else random.Random(SEED).sample(scenes, 10_000):
        caption = make_caption(scene, language)
        assert captions.setdefault(caption, scene) == scene
        assert parse_caption(caption) == scene


@pytest.mark.parametrize(
    "scene, english, chinese",
    [
        (Scene((Group(1, "red", "circle"),)), "a red circle", "一个红色的圆形"),
        (Scene((Group(3, "blue", "cross", "small"),)), "three small blue crosses", "三个蓝色的小十字形"),
        (
            Scene((Group(1, "cyan", "square", "large"),), position="top"),
            "a large cyan square at the top",
            "一个青色的大正方形在上方",
        ),
        (
            Scene((Group(1, "red", "circle"), Group(2, "blue", "square", "small")), "left of"),
            "a red circle left of two small blue squares",
            "一个红色的圆形在两个蓝色的小正方形的左边",
        ),
    ],
)
def test_captions_read_as_people_write_them(scene, english, chinese):
    assert (make_caption(scene, "en"), make_caption(scene, "zh")) == (english, chinese)


@pytest.mark.parametrize(
    "text",
    ["", "a dog", "a red circles", "two red circle", "a red circle ", "a red circle above", "Three red circles",
     "一个红色的圆形在", "a 红色的 circle"],
)  # fmt: skip
def test_any_other_text_is_refused(text):
    with pytest.raises(DataError, match="not a caption of the shapes world"):
        parse_caption(text)


def test_every_colour_and_shape_of_a_held_out_pair_is_seen_with_others():
    for colour, shape in HELD_OUT:
        assert {other for other in SHAPES if (colour, other) not in HELD_OUT}
        assert {other for other in COLOURS if (other, shape) not in HELD_OUT}
    assert {shape for _, shape in HELD_OUT} == set(SHAPES)


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("max_objects", [1, 2, 3])
def test_drawn_scenes_are_of_the_grammar_and_of_their_split(held_out, max_objects):
    scenes = [draw_scene(make_rng(number), held_out, max_objects) for number in range(600)]
    known = set(all_scenes())
    assert set(scenes) <= known
    assert all(scene.is_held_out == held_out and 1 <= len(scene.objects) <= max_objects for scene in scenes)
    assert {len(scene.objects) for scene in scenes} == set(range(1, max_objects + 1))
    assert {scene.relation for scene in scenes} == ({None, *RELATIONS} if max_objects > 1 else {None})
    assert {scene.position for scene in scenes} == {None, *POSITIONS}


@pytest.mark.parametrize("names", [POSITIONS, RELATIONS])
def test_an_offset_lies_in_one_direction_at_most(names):
    offsets = make_rng().uniform(-0.5, 0.5, (5000, 2))
    inside = np.array([lies(offsets, direction) for direction in names.values()])
    assert inside.sum(0).max() == 1 and (inside.mean(1) > 0.03).all()
    margins = np.array([lies(offsets, direction, 0.05) for direction in names.values()])
    assert (inside >= margins).all() and margins.sum() < inside.sum()


# -- pictures


def test_objects_keep_their_distance_and_the_caption_its_word():
    for number in range(300):
        rng = make_rng(number)
        scene = draw_scene(rng, held_out=number % 2 == 0)
        extents, centres = place_objects(scene, rng)
        assert (centres - extents[:, None] / 2 >= BORDER - 1e-9).all()
        assert (centres + extents[:, None] / 2 <= 1 - BORDER + 1e-9).all()
        for i, j in itertools.combinations(range(len(extents)), 2):
            assert np.abs(centres[i] - centres[j]).max() - (extents[i] + extents[j]) / 2 >= GAP - 1e-9
        for group, extent in zip(scene.objects, extents, strict=True):
            assert group.size is None or (extent > 0.35) == (group.size == "large")
        if scene.position:
            assert lies(centres[0] - 0.5, POSITIONS[scene.position], 0.03)
        if scene.relation:
            first = scene.groups[0].count
            assert lies(centres[:first].mean(0) - centres[first:].mean(0), RELATIONS[scene.relation], 0.03)


@pytest.mark.parametrize("shape, area", [("circle", np.pi / 4), ("square", 1), ("triangle", 0.5), ("cross", 0.5904)])
def test_shapes_are_antialiased_and_fill_their_box(shape, area):
    share = coverage(shape, (20.3, 15.8), 24, (32, 40))
    assert share.shape == (32, 40) and share.min() == 0 and share.max() == 1
    assert share.sum() == pytest.approx(area * 24**2, rel=0.02)
    columns, rows = np.flatnonzero(share.sum(0)), np.flatnonzero(share.sum(1))
    assert (columns[0], columns[-1], rows[0], rows[-1]) == (8, 32, 3, 27)
    assert ((share > 0.1) & (share < 0.9)).any()


@pytest.mark.parametrize("size", [32, 48, 64, 100])
def test_a_picture_is_a_function_of_seed_split_and_row(size):
    world = World(size, "both", seed=SEED)
    rows = {(held_out, row): world.draw(held_out, row) for held_out in (False, True) for row in (0, 1, 5000)}
    for (held_out, row), (scene, caption, picture) in rows.items():
        again = World(size, "both", seed=SEED).draw(held_out, row)
        assert again[:2] == (scene, caption) and (again[2] == picture).all()
        assert picture.shape == (size, size, 3) and picture.dtype == np.uint8 and parse_caption(caption) == scene
    assert len({picture.tobytes() for _, _, picture in rows.values()}) == len(rows)
    other = World(size, "both", seed=SEED + 1).draw(False, 0)
    assert not np.array_equal(other[2], rows[False, 0][2])


def test_the_background_is_light_and_objects_have_their_colours():
    for number, (name, colour) in enumerate(COLOURS.items()):
        scene = Scene((Group(1, name, "square", "large"),), position="middle")
        picture = draw_picture(scene, 64, make_rng(number)).astype(int)
        assert picture[[0, 0, -1, -1], [0, -1, 0, -1]].min() >= 180
        assert np.abs(picture[30:34, 30:34].mean((0, 1)) - colour).max() <= 16


# -- data


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(write, "ROWS_PER_PART", 16)
    monkeypatch.setattr(write, "NUM_PROMPTS", 20)


@pytest.fixture
def data(tmp_path, small_parts) -> Path:
    make_shapes_world(tmp_path / "out", WORLD, 40, num_workers=1)
    return tmp_path / "out"


def test_the_files_hold_what_the_world_draws(data):
    for name, held_out, count in (("demo", False, 40), ("held_out", True, 4)):
        rows = read_rows(data, name)
        assert len(rows) == count
        for number, row in enumerate(rows):
            scene, caption, picture = WORLD.draw(held_out, number)
            assert row.caption == caption and scene.is_held_out == held_out
            assert row.meta["wrong_caption"] == WORLD.draw(held_out, number + 1)[1]
            assert np.array_equal(decode_pixels(row.image), picture)
    assert json.loads((data / "manifest.json").read_text())["rows"] == 40


def test_prompts_are_marked_and_known_to_the_tokenizer(data):
    tokenizer = load_tokenizer(data / "tokenizer", write.MAX_CAPTION_TOKENS["short"])
    for name, kind, held_out in (("seen", "seen", False), ("heldout", "unseen", True)):
        lines = [line.split("\t") for line in (data / f"prompts-{name}.txt").read_text().splitlines()]
        prompts = [prompt for prompt, _ in lines]
        assert len(set(prompts)) == 20 and {mark for _, mark in lines} == {kind}
        assert all(parse_caption(prompt).is_held_out == held_out for prompt in prompts)
    scenes = random.Random(SEED).sample(list(all_scenes()), 500)
    captions = [make_caption(scene, language) for scene in scenes for language in LANGUAGES]
    assert tokenizer.unknown_words(captions) == []
    assert (tokenizer.encode(captions)[:, -1] == 0).all()  # none was cut


# -- long captions


def long_rows(count: int):
    """(scene, what is drawn, its long caption, its short one) of rows of either split."""
    for row in range(count):
        held_out = row % 4 == 0
        rng = write.make_rng(SEED, write.Stream.SHAPES_WORLD, int(held_out), row)
        scene = draw_scene(rng, held_out, LONG.max_objects)
        yield scene, arrange(scene, rng), LONG.caption(held_out, row), SHORT.caption(held_out, row)


def read_paragraph(caption: str) -> dict[str, list[dict[str, str]]]:
    """What the sentences behind the opening say: {kind: [{field: words}]}; each is a phrase of exactly one kind."""
    told = defaultdict(list)
    for sentence in re.findall(r"[^.]+\.", caption)[1:]:
        ((kind, found),) = ((kind, found) for kind, phrase in PHRASES if (found := phrase.fullmatch(sentence.strip())))
        told[kind].append({name: words.lower() for name, words in found.groupdict().items()})
    return told


def make_pattern(phrase: str) -> re.Pattern:
    words = {**dict.fromkeys(("name", "first", "second"), "the "), "relation": "(?:left|right|above|below)"}
    fields = re.sub(
        r"{(\w+)}", lambda one: f"(?P<{one[1]}>{words.get(one[1], '')}[a-z ,]*?)", phrase.replace(".", r"\.")
    )
    return re.compile(fields, re.I)


KINDS = ("background", "object", "pair", "colours", "shapes", "count", "room")
PHRASES = [(kind, make_pattern(phrase)) for kind in KINDS for phrase in getattr(PARAGRAPHS, kind)]


def names_of(scene: Scene, centres: np.ndarray) -> list[str]:
    """What a long caption calls each object; like ones are counted from the left."""
    names = []
    for i, group in enumerate(scene.objects):
        like = sorted(centres[j, 0] for j, other in enumerate(scene.objects) if other == group)
        words = ([""], ["left ", "right "], ["leftmost ", "next ", "rightmost "])[group.count - 1]
        names.append(f"the {words[like.index(centres[i, 0])]}{group.colour} {group.shape}")
    return names


def test_either_caption_is_of_the_same_picture():
    for world in (LONG, World(48, max_objects=1, captions="long")):
        for held_out, row in ((False, 0), (False, 7), (True, 7)):
            scene, caption, picture = world.draw(held_out, row)
            short = replace(world, captions="short").draw(held_out, row)
            assert short[:2] == (scene, shorten(caption)) and np.array_equal(picture, short[2])
            assert caption == replace(world).caption(held_out, row) != short[1]


def test_a_long_caption_opens_with_its_short_one_and_is_graded_as_that():
    openings = set()
    for scene, _, caption, short in long_rows(300):
        assert shorten(caption) == short and parse_caption(caption) == scene == parse_caption(short)
        assert len(caption.split()) <= MAX_WORDS and caption.isascii()
        openings.add(caption.split(short)[0])
    assert len(openings) == len(PARAGRAPHS.opening)
    with pytest.raises(DataError, match="not a caption of the shapes world"):
        parse_caption("This picture shows a dog. Nothing touches the border.")


def test_a_long_caption_tells_every_object_as_it_is_drawn():
    for scene, drawn, caption, _ in long_rows(300):
        objects = {one["name"]: one for one in read_paragraph(caption)["object"]}
        names = names_of(scene, drawn.centres)
        assert sorted(objects) == sorted(names)
        for name, group, extent, (x, y) in zip(names, scene.objects, drawn.extents, drawn.centres - 0.5, strict=True):
            one = objects[name]
            assert EXTENTS[one["size"]][0] <= extent <= EXTENTS[one["size"]][1] and group.size in (None, one["size"])
            assert one.get("width") in (None, f"about {'three' if extent < 0.35 else 'four'} tenths")
            assert one["quarter"] == f"{'upper' if y < 0 else 'lower'} {'left' if x < 0 else 'right'}"
            across = "left" if x < -0.1 else "right" if x > 0.1 else ""
            down = ("upper" if across else "top") if y < -0.1 else ("lower" if across else "bottom") if y > 0.1 else ""
            assert one["place"].split("the ")[1] == (f"{down} {across}".strip() or "middle")


def test_a_long_caption_tells_how_each_two_lie_what_is_absent_and_the_background():
    for scene, drawn, caption, _ in long_rows(300):
        told, names = read_paragraph(caption), names_of(scene, drawn.centres)
        assert len(told["pair"]) == len(names) * (len(names) - 1) // 2
        for pair in told["pair"]:
            x, y = np.subtract(*(drawn.centres[names.index(pair[one])] for one in ("first", "second")))
            sides = [("left of", -x), ("right of", x), ("above", -y), ("below", y)]
            true = sorted((side for side in sides if side[1] > 0.1), key=lambda side: -side[1])
            assert pair["relation"] == " and ".join(name for name, _ in true)
        for kind, known in (("colour", COLOURS), ("shape", SHAPES)):
            ((absent,),) = (one.values() for one in told[f"{kind}s"])
            assert {*re.split(", | or ", absent)} == {*known} - {getattr(one, kind) for one in scene.objects}
        (background,), (count,), light = told["background"], told["count"], drawn.background.mean()
        shade = "light grey" if light <= 217 else "very light grey" if light <= 232 else "nearly white"
        assert background["shade"] == shade and len(told["room"]) == 1
        assert count["count"].split()[0] == ("one", "two", "three")[len(names) - 1]


def test_no_long_caption_has_more_words_or_tokens_than_it_may():
    """Of three objects with the longest phrasings of all, and not only of those that were drawn."""
    fields = {"scene": "a small red circle left of two large blue squares", "shade": "very light grey", "size": "small",
              "name": "the leftmost red circle", "place": "at the upper left", "quarter": "upper left",
              "width": "about three tenths", "first": "the leftmost red circle", "relation": "left of and above",
              "second": "the next red circle", "colours": "red, yellow, green, cyan or blue",
              "shapes": "circle, square or triangle", "count": "three objects"}  # fmt: skip
    kinds = ("opening", *KINDS)
    for count, limit in (
        (str.split, MAX_WORDS),
        (re.compile(r"\w+|[.,]").findall, write.MAX_CAPTION_TOKENS["long"] - 2),
    ):
        most = {kind: max(len(count(text.format(**fields))) for text in getattr(PARAGRAPHS, kind)) for kind in kinds}
        assert sum(most.values()) + 2 * most["object"] + 2 * most["pair"] <= limit


def test_long_captions_have_files_of_their_own_kind(tmp_path, small_parts):
    for captions in ("short", "long"):
        demo_data(str(tmp_path / captions), size=32, world="shapes", rows=20, seed=SEED, captions=captions)
    for name in ("demo", "held_out"):
        for short, long in zip(*(read_rows(tmp_path / kind, name) for kind in ("short", "long")), strict=True):
            assert long.meta["short_caption"] == short.caption == shorten(long.caption) and long.image == short.image
            assert (
                "short_caption" not in short.meta and shorten(long.meta["wrong_caption"]) == short.meta["wrong_caption"]
            )
    assert "captions" not in json.loads((tmp_path / "short/manifest.json").read_text())  # as older versions wrote it
    tokenizer = load_tokenizer(tmp_path / "long/tokenizer", write.MAX_CAPTION_TOKENS["long"])
    captions = [text for _, _, *texts in long_rows(300) for text in texts]
    assert tokenizer.unknown_words(captions) == [] and (tokenizer.encode(captions)[:, -1] == 0).all()
    for name in ("prompts-seen.txt", "prompts-heldout.txt"):
        short, long = ((tmp_path / kind / name).read_text().splitlines() for kind in ("short", "long"))
        assert [shorten(line.split("\t")[0]) for line in long] == [line.split("\t")[0] for line in short]


# -- files


def test_a_world_with_few_captions_has_all_of_them_as_prompts():
    prompts = World(32, max_objects=1).prompts(held_out=True, count=1000)
    assert len(prompts) == len(set(prompts)) == 4 * 3 * 6


def test_stopped_anywhere_the_same_command_ends_with_the_same_bytes(data, tmp_path, monkeypatch):
    before, touched = read_tree(data), tmp_path / "out/parts/demo-00000.gz"
    state = touched.stat().st_ino
    (data / "manifest.json").unlink()
    (data / "parts/demo-00001.gz").unlink()
    (data / "prompts-seen.txt").unlink()
    make_shapes_world(data, WORLD, 40, num_workers=1)
    assert read_tree(data) == before and touched.stat().st_ino == state


def test_more_rows_begin_with_the_same(tmp_path, small_parts):
    make_shapes_world(tmp_path / "few", World(32), 10, 1)
    make_shapes_world(tmp_path / "many", World(32), 20, 1)
    assert read_rows(tmp_path / "few") == read_rows(tmp_path / "many")[:10]


def test_another_world_is_refused_and_made_again_when_asked(data, tmp_path, capsys):
    flags = {"size": 32, "world": "shapes", "rows": 12, "seed": SEED}
    with pytest.raises(ConfigError, match="rows was 40 and is 12; language was 'both' and is 'en'.*--redo"):
        demo_data(str(data), **flags)
    demo_data(str(data), **flags, redo=True)
    demo_data(str(tmp_path / "fresh"), **flags)
    assert read_tree(data) == read_tree(tmp_path / "fresh")
    assert f"12 scenes; for ppldm train: --file_list {tmp_path}/fresh/demo.filelist.list" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"size": 16}, "--size is 16"),
        ({"rows": 0}, "--rows is 0"),
        ({"max_objects": 4}, "--max-objects is 4"),
        ({"seed": -1}, "--seed is -1"),
        ({"captions": "long", "language": "both"}, "--captions long is English"),
        ({"limit": 5}, "--limit and --subset"),
        ({"subset": "quickstart"}, "--limit and --subset"),
        ({"world": "openmoji", "language": "both"}, "--language both is for --world shapes"),
    ],
)
def test_wrong_flags_are_named(tmp_path, flags, words):
    with pytest.raises(ConfigError, match=words):
        demo_data(str(tmp_path / "out"), **{"world": "shapes", "size": 32} | flags)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(OutputError, match="unknown origin"):
        demo_data(str(tmp_path), size=32, world="shapes", rows=1)


def test_a_short_caption_alone_places_no_object(monkeypatch):
    """Each row asks for that of the next one."""
    placed = []
    monkeypatch.setattr(write, "arrange", lambda *given: placed.append(given) or arrange(*given))
    assert World(32).caption(False, 3) and len(World(32).prompts(False, 4)) == 4 and not placed
    assert World(32, captions="long").caption(False, 3) and len(placed) == 1
