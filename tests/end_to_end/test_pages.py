"""Every command of README.md and docs/ does what it says: it is run at a small scale, or says why it is not."""

import os
import random
import re
import shlex
import shutil
import subprocess

import doc_pages
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doc_pages import PAGES, REASONS, ROOT, RUN_BY, WORLD, blocks, small
from sampling import ALL
from warm_programs import serving

from ppldm.cli.main import run

SMALL = f"""
import sys
sys.path.insert(0, {os.path.dirname(doc_pages.__file__)!r})
import doc_pages
from ppldm.cli.main import main
sys.argv = ["ppldm", *doc_pages.small(sys.argv[1:])]
main()
"""
COMMAND = re.compile(r"^([A-Z_]+=\S+ )*(ppldm|python|bash|pip|sbatch|spark-submit|kubectl) ", re.MULTILINE)


def name_of(page):
    return str(page.relative_to(ROOT))


def to_run(page) -> list[list[doc_pages.Block]]:
    """The blocks of a page that are run or are a file, of each of its parts that has a command."""
    heading = doc_pages.DIVIDED.get(name_of(page))
    end = page.read_text("utf-8").splitlines().index(heading) + 1 if heading else 0
    parts = [[], []]
    for block in blocks(page):
        if block.file or (block.language and not block.reason):
            parts[block.line > end].append(block)
    return [part for part in parts if any(block.language in ("bash", "python") for block in part)]


CHINESE = [page for page in PAGES if ROOT / "docs/zh" in page.parents]
RUNNABLE = [
    pytest.param(page, part, id=name_of(page) + " part 2" * number)
    for page in PAGES
    if page not in CHINESE  # these have the same commands
    for number, part in enumerate(to_run(page))
]
DRAWN = RUNNABLE if ALL else random.Random(int(os.environ.get("PPLDM_SEED", 1))).sample(RUNNABLE, 6)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_has_a_known_reason_and_commands_are_marked_as_commands(page):
    for block in blocks(page):
        where = f"{name_of(page)}:{block.line}"
        assert block.language or not COMMAND.search(block.text), f"{where} has commands and is not marked as bash"
        assert block.language in ("", "bash", "python", "yaml"), where
        if block.reason and (found := RUN_BY.fullmatch(block.reason)):
            assert (ROOT / found[1]).exists(), where
        elif block.reason:
            assert block.reason in REASONS, f"{where}: {block.reason}"
        assert block.language != "yaml" or block.reason or block.file, f"{where} says neither its file nor a reason"


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_chinese_pages_have_commands_of_the_english_ones(page):
    """Each line of a command, without its comment, stands on an English page."""
    known = "".join(block.text for one in PAGES if one not in CHINESE for block in blocks(one))
    for block in blocks(page):
        for line in block.text.splitlines() if block.language == "bash" else ():
            assert re.sub(r"\s+#.*", "", line) in known, f"{name_of(page)}:{block.line}: {line}"


def test_small_commands():
    own = len(doc_pages.THE_RUNS_OWN)
    assert small(["train", "…", "--max_steps", "900", "--use_ema"])[: 2 + own] == [
        *("train", *doc_pages.THE_RUNS_OWN, "--use_ema")
    ]
    assert small(["precompute", "list", "--resolutions", "256", "512", "--dry-run"]) == [
        *("precompute", "list", "--dry-run", "--resolutions", "32")
    ]
    assert small(["precompute", "list", "--text-encoder", "x"]) == ["precompute", "list", "--text-encoder", "x"]
    assert small(["train", "--preset", "x", "--print_config"]) == ["train", "--preset", "x", "--print_config"]


def link_weights(source, target):
    """Copy a file; weights, which are large and never written to, become another name of the same file."""
    return (os.link if str(source).endswith((".pdparams", ".pdopt")) else shutil.copy2)(source, target)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with all that the pages take for granted."""
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


def make_world(folder):
    for name, text in doc_pages.FILES.items():
        (folder / name).write_text(text)
    before = os.getcwd()
    os.chdir(folder)
    try:
        for line in WORLD.strip().splitlines():
            run(small(shlex.split(line)[1:]))
    finally:
        os.chdir(before)
    for source, names in doc_pages.COPIES.items():
        for name in names.split():
            shutil.copytree(folder / source, folder / name, dirs_exist_ok=True, copy_function=link_weights)
    part = folder / "shapes_world/data/parts/demo-00000.gz"
    for name in doc_pages.LISTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{part}\n")
        (folder / f"{name}.list").write_text(f"{folder / name}\n")
    shutil.copy2(part, folder / "part-00000.gz")
    shutil.copy2(next(part.parent.glob(f"{part.name}.*.latents")), folder / "part-00000.gz.6362e88d.latents")
    shutil.copy2(folder / "quickstart/data/images/1F319.png", folder / "boat.jpg")
    rows = {"URL": ["http://example.com/a.jpg"], "TEXT": ["a"], "WIDTH": [640.0], "HEIGHT": [640.0]}
    rows |= {"similarity": [0.3], "punsafe": [0.1], "pwatermark": [0.1], "AESTHETIC_SCORE": [5.0], "hash": [1]}
    (folder / "laion_2b_en_ae4.5").mkdir()
    pq.write_table(pa.table(rows), folder / "laion_2b_en_ae4.5/2B-en-4.5_1.parquet")


@pytest.fixture(scope="session")
def small_programs(tmp_path_factory):
    """A folder with the programs of the pages' commands, at a small scale."""
    with serving(tmp_path_factory.mktemp("bin"), ppldm=("-c", SMALL)) as folder:
        yield folder


@pytest.mark.turn("commands lead from a folder to pictures", 1)
@pytest.mark.slow
@pytest.mark.parametrize(("page", "chosen"), DRAWN)
def test_the_commands_of_a_page_do_what_they_say(page, chosen, world, small_programs, tmp_path):
    folder = tmp_path / "here"
    shutil.copytree(world, folder, copy_function=link_weights)
    if name_of(page) in doc_pages.OWN:
        shutil.rmtree(folder / doc_pages.OWN[name_of(page)])
    for name in ("run_scripts", "benchmarks", "examples"):
        (folder / name).symlink_to(ROOT / name)
    environ = {
        **os.environ,
        "PATH": f"{small_programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PPLDM_CACHE_DIR": str(tmp_path / "cache"),
    }
    for block in chosen:
        if block.file:
            (folder / block.file).write_text(block.text)
    for block in chosen:
        if block.language not in ("bash", "python"):
            continue
        command = ["bash", "-ec"] if block.language == "bash" else ["python", "-c"]
        done = subprocess.run(
            [*command, block.text], cwd=folder, env=environ, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{name_of(page)}:{block.line}\n{done.stdout[-1500:]}\n{done.stderr[-2500:]}"
    shutil.rmtree(folder)  # it is large
