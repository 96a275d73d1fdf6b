"""READMEs and pages: short, the same in both languages where there are two, true to the code; and the site builds."""

import ast
import html
import os
import random
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import make
import pytest
from sampling import ALL

from ppldm.cli.main import COMMANDS, load_command, parse_flags
from ppldm.config.recipe import schema_of
from ppldm.families.base import get_family, list_families
from ppldm.training.commands.train import read_recipe
from ppldm.utils.machine.devices import KINDS
from ppldm.utils.machine.nvidia_smi import BUILDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README_cn.md"))
INSTALLATION, INSTALLATION_CN = (
    (DOCS / f"{name}.md").read_text("utf-8") for name in ("installation", "zh/installation")
)
PAGES = sorted(DOCS.rglob("*.md"))
ENGLISH_PAGES = [ROOT / "README.md", *(page for page in PAGES if DOCS / "zh" not in page.parents)]

MAX_LINES = 4604


def commands(text: str) -> list[str]:
    """The lines of all fenced blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]


def without_blocks(text: str, instead: str = "") -> str:
    return re.sub(r"^( *```+)\w*\n.*?^\1$", instead, text, flags=re.MULTILINE | re.DOTALL)


def num_lines(*pages: Path) -> int:
    return sum(len(page.read_text(encoding="utf-8").splitlines()) for page in pages)


def test_the_documentation_is_short():
    assert num_lines(*PAGES, ROOT / "README.md", ROOT / "README_cn.md") <= MAX_LINES
    assert num_lines(ROOT / "README.md") <= 110 and num_lines(ROOT / "README_cn.md") <= 110
    assert num_lines(DOCS / "architecture.md") <= 120


@cache
def settings() -> dict[str, set[str]]:
    """By the key of each setting of a training, how prose names it: its flags, its key, and its name in backticks."""
    found = {}
    for family in list_families():
        for one in schema_of(get_family(family).Config).values():
            names = {one.name, *one.also}
            marked = {f"`{name}`" for name in names if "_" in name}  # others are words of their own too
            found[one.key] = {f"--{name}" for name in names} | marked | {f"`{one.key}`"}
    return found


def told_often(pages: dict[str, str]) -> dict[str, list[str]]:
    """The settings that are told on more than two of the pages, outside commands, and on which.

    Other commands have flags of the same names: those of `ppldm show --control canny`, in backticks, are theirs.
    """
    told: dict[str, list[str]] = {}
    for page, text in pages.items():
        prose = re.sub(r"`ppldm (?!train\b)[^`]*`", "", without_blocks(text))
        words = set(re.findall(r"--[a-z]\w+(?:-\w+)*|`[\w.]+`", prose))
        for key, names in settings().items():
            if names & words:
                told.setdefault(key, []).append(page)
    return {key: found for key, found in told.items() if len(found) > 2}


def test_a_setting_is_told_on_two_pages_at_most():
    often = told_often({str(page.relative_to(ROOT)): page.read_text("utf-8") for page in ENGLISH_PAGES})
    assert not often


def test_settings_that_are_told_often_are_found():
    assert "data.crop_fraction" in settings()
    text = "A flag, `--crop_fraction 0.9`, is told.\n"
    block = "```bash\nppldm train --crop_fraction 0.9\n```\n"
    assert told_often({"a": text, "b": "Its key is `data.crop_fraction`.", "c": "As `crop_fraction`."}) == {
        "data.crop_fraction": ["a", "b", "c"]
    }
    other = "`ppldm precompute --crop_fraction 1` does.\n"
    assert told_often({"a": text, "b": text, "c": block, "d": other}) == {}


def first_paragraph(text: str) -> str:
    """What stands below the title (and the link to the other language), as one line."""
    (_, *parts) = [part for part in text.split("\n\n") if not re.fullmatch(r"\[[^]]*\]\([^)]*\)", part)]
    return " ".join(parts[0].split())


def names_its_task(text: str) -> bool:
    """Prose, and not a table, a command or a picture, that speaks to a reader who wants something."""
    found = first_paragraph(text)
    return found[0].isalpha() and bool(re.search(r"\b(you|your|how to)\b", found, re.IGNORECASE))


def test_every_page_is_opened_by_a_task():
    without = [str(page.relative_to(ROOT)) for page in ENGLISH_PAGES if not names_its_task(page.read_text("utf-8"))]
    assert not without


FORECAST = r"^\| `([\w-]+)` \| ([\d.,]+) M \| (\d+) \| ([\d.]+) \|"
FORECASTS = re.findall(FORECAST, ENGLISH, re.MULTILINE)
TRIED = FORECASTS if ALL else random.Random(int(os.environ.get("PPLDM_SEED", 1))).sample(FORECASTS, 1)


@pytest.mark.turn("a forecast of doctor holds", 2)
@pytest.mark.parametrize("preset, millions, pixels, memory", TRIED)
def test_the_readmes_forecast_is_that_of_doctor(preset, millions, pixels, memory, monkeypatch, tmp_path):
    """On a device with a memory of its own: parameters and gigabytes, as they are printed."""
    from ppldm.training.commands.dry_run import reckon
    from ppldm.training.doctor.memory import estimate

    row = f"| `{preset}` | {millions} M | {pixels} | {memory} |"
    monkeypatch.setattr("ppldm.training.doctor.memory.current_kind", lambda: KINDS["gpu"])
    words = ["--preset", preset, "--file_list", str(ROOT / "data/filelist/train.filelist.list"), "--do_train"]
    recipe = read_recipe([*words, "--output_dir", str(tmp_path / "out")], True, config=None)
    devices = 8 if preset.startswith("ldm-8x") else 1
    trained = sum(one["trained"] for one in reckon(recipe, devices)["components"].values()) / 1e6
    shown = f"{trained:,.1f}" if trained < 10 else f"{trained:,.0f}"
    found = f"| `{preset}` | {shown} M | {recipe.data.resolution} | {estimate(recipe, devices).total / 1e9:.1f} |"
    assert found == row


def test_both_languages_have_the_same_forecasts():
    assert len(FORECASTS) >= 6
    assert re.findall(FORECAST, CHINESE, re.MULTILINE) == FORECASTS


def test_both_languages_have_the_same_sections_and_commands():
    headings = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (ENGLISH, CHINESE)]
    assert headings[0] == headings[1]
    assert commands(ENGLISH) == commands(CHINESE)


# What is there in full in Chinese; other links lead to the English page.
IN_CHINESE = {"index", "guide", "installation", "faq", "data", "training", "drawing"}


def test_pages_that_are_there_in_chinese():
    assert {str(path.relative_to(DOCS / "zh")) for path in PAGES if DOCS / "zh" in path.parents} == {
        f"{name}.md" for name in IN_CHINESE
    }


def shape_of(text: str) -> list[tuple]:
    """What both languages share of each section: level, pictures, blocks, flags and, of tables, rows and figures.

    A made table, between `<!-- name -->` and `<!-- end -->`, may be on one of the pages only.
    """
    text = re.sub(r"(\|.*\n\|.*\n)?<!-- (?!not run|file)[\w -]+ -->\n(.|\n)*?<!-- end -->\n", "", text)
    sections = []
    for level, section in re.findall(r"^(#+) (.*?)(?=^#+ |\Z)", without_blocks(text, BLOCK), re.MULTILINE | re.DOTALL):
        rows = [row for row in section.splitlines() if row.lstrip().startswith("|")]
        figures = sorted(FIGURE.findall(re.sub(r"`[^`]*`", "", "\n".join(rows))))
        pictures = re.findall(r"images/([\w.-]+)\)", section)
        flags = sorted(set(re.findall(r"--[a-z][\w-]+", section)))
        sections.append((level, len(rows), section.count(BLOCK), pictures, figures, flags))
    return sections


BLOCK = "<block>"
FIGURE = re.compile(r"\d+(?:[.,]\d+)*(?![.,]?\d| ?(?:million|billion|[BM]\b|亿|万))")  # but for those told in words


@pytest.mark.parametrize("page", sorted((DOCS / "zh").rglob("*.md")), ids=lambda path: path.stem)
def test_chinese_pages_have_the_sections_tables_and_figures_of_the_english_ones(page):
    chinese, english = (shape_of(one.read_text("utf-8")) for one in (page, DOCS / page.relative_to(DOCS / "zh")))
    assert [one[0] for one in chinese] == [one[0] for one in english]
    for ours, theirs in zip(chinese, english, strict=True):
        assert ours == theirs


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site. Dead links, dead anchors and pages that no menu names are warnings, and `--strict` fails on them."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not included in the" not in done.stderr + done.stdout, done.stderr
    return folder


def read_page(site: Path, name: str) -> str:
    """A page of the site as text: tags become blanks."""
    text = (site / name / "index.html").read_text(encoding="utf-8")
    return html.unescape(re.sub(r"<[^>]+>", " ", text))


def test_the_site_builds_without_a_warning_and_has_every_page(site):
    for page in (*PAGES, *(DOCS / name for name in make.PAGES)):
        name = page.relative_to(DOCS).with_suffix("")
        assert (site / (name.parent if name.name == "index" else name) / "index.html").exists(), name


def test_the_site_has_all_settings_and_the_whole_api(site):
    page = read_page(site, "settings")
    assert not [key for key in settings() if not re.search(rf"\b{re.escape(key)}\b", page)]
    page = read_page(site, "api")
    for name in ("load(path", "TextToImage.generate(", "class PpldmError"):
        assert name in page, name
    for module in make.MODULES:
        assert module in page


def test_a_setting_has_one_row_with_its_default_and_no_path_of_this_machine():
    text = make.settings_page()
    rows = re.findall(r"^\| `([\w.]+)`(.*)\|$", text, re.MULTILINE)
    assert {key for key, _ in rows} == settings().keys()
    assert len(rows) == len(set(rows)), "families that share an option share its row"
    assert "| Trainer 42, loop 23 |" in text and str(ROOT) not in text


def test_the_site_has_what_was_measured(site):
    page = read_page(site, "results")
    for name in make.MEASURED:
        assert f"results/{name} -->" in (DOCS / "results.md").read_text("utf-8"), f"docs/results.md lacks {name}"
        record = make.read_results(name)
        assert record["command"] in page and record["date"][:10] in page
    one = make.read_results("loader")["results"]["loaders"][0]
    assert re.search(rf"{one['loader']}\s+{one['cores']}\s+{one['samples_per_second']:.0f}\s", page)


def test_a_mark_of_a_page_is_a_table_that_can_be_made():
    known = {name for page in PAGES for name in re.findall(r"<!-- made: (.+) -->$", page.read_text("utf-8"), re.M)}
    assert known == set(make.TABLES)
    made = make.with_tables("a\nSee there. <!-- made: presets -->\nb\n")
    assert made.startswith("a\n| preset |") and "| `ldm-tiny-cpu` | Text to image" in made and made.endswith("|\nb\n")


def test_pages_link_to_committed_files_only():
    """What is made with the site is not there for those who read the pages in the repository."""
    for page in (*PAGES, ROOT / "README.md", ROOT / "README_cn.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_code_names_pages_that_exist():
    sources = [
        *(ROOT / "ppldm").rglob("*.py"),
        *(ROOT / "ppldm").rglob("*.yaml"),
        *(ROOT / "run_scripts").rglob("*.sh"),
    ]
    for path in (*sources, *(ROOT / "benchmarks").rglob("*.py"), ROOT / "setup.py", ROOT / "SECURITY.md"):
        for name in re.findall(r"docs/[\w/]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def test_pages_name_files_of_the_package_that_exist():
    """A page names a file by its path in the repository or in the package."""
    for page in (*PAGES, ROOT / "README.md", ROOT / "README_cn.md", ROOT / "CONTRIBUTING.md"):
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text("utf-8")):
            is_there = (
                (ROOT / name).exists() or (ROOT / "ppldm" / name).exists() or (ROOT / "ppldm/data" / name).exists()
            )
            assert is_there or "NAME" in name, f"{page.relative_to(ROOT)} names {name}"


def test_the_builds_for_gpus_are_those_that_setup_installs():
    for text in (INSTALLATION, INSTALLATION_CN):
        for build in BUILDS:
            assert build.cuda in text and build.min_driver in text
        indexes = re.findall(r"-i (https://\S+)", text)
        assert indexes and set(indexes) <= {build.index_url for build in BUILDS}


def test_files_and_commands_that_are_named_exist():
    for text in (ENGLISH, CHINESE):
        for path in re.findall(r"(?:examples|run_scripts|data/filelist|docs|requirements)/[\w./]+\.\w+", text):
            if "laion400m_en" not in path:
                assert (ROOT / path).exists(), path
        for words in re.findall(r"^ppldm (([\w-]+)(?: [\w-]+)?)", "\n".join(commands(text)), re.MULTILINE):
            assert COMMANDS.keys() & set(words), words


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_the_docs_have_the_flags_that_they_are_given(path):
    text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    for words in (shlex.split(line)[1:] for line in commands(text) if line.startswith("ppldm ")):
        name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        if not getattr(load_command(name), "takes_words", False):
            flags = [word.partition("=")[0] for word in words if word.startswith("--")]
            assert not [flag for flag in flags if "_" in flag], "--help shows hyphens"
            parse_flags(name, words[len(name.split()) :])


@cache
def messages() -> list[str]:
    """All texts in the code, with … for what is filled in."""
    found = []
    for path in (ROOT / "ppldm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize(
    "text", [(DOCS / f"{name}.md").read_text("utf-8") for name in ("faq", "zh/faq")], ids=["en", "cn"]
)
def test_messages_of_the_troubleshooting_table_are_messages_of_the_code(text):
    """The first cell of a row quotes what one sees; of other words than ours (libGL) it names a file."""
    table = text[text.index("PPLDM_DEBUG=1") :].split("\n\n")[0]
    quoted = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    ours = [quote for quote in quoted if quote != "libGL.so.1"]
    assert len(ours) >= 3
    known = messages()
    for quote in ours:
        pattern = ".*".join(re.escape(piece) for piece in re.sub(r"CompVis/(?=…)", "", quote).strip("…").split("…"))
        assert any(re.search(pattern, message, re.DOTALL) for message in known), quote
