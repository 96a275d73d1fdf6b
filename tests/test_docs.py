"""READMEs and pages say the same in both languages, nothing in them names what is not there, and the site builds."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ppldm.cli.main import COMMANDS, load_command, parse_flags
from ppldm.utils.machine.builds import BUILDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_spec = importlib.util.spec_from_file_location("make", DOCS / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README_cn.md"))
INSTALLATION, INSTALLATION_CN = (
    (DOCS / f"{name}.md").read_text("utf-8") for name in ("installation", "zh/installation")
)


def commands(text: str) -> list[str]:
    """The lines of all fenced blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]


def test_both_languages_have_the_same_sections_and_commands():
    headings = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (ENGLISH, CHINESE)]
    assert headings[0] == headings[1]
    assert commands(ENGLISH) == commands(CHINESE)


def test_readmes_hold_what_a_first_hour_needs():
    for text in (ENGLISH, CHINESE):
        assert len(text.encode()) <= 12_000


ENGLISH_ONLY = {"settings.md", "api.md", "architecture.md"}  # two are made from the code


def test_every_page_is_there_in_chinese():
    english, chinese = (
        {str(path.relative_to(folder)) for path in folder.rglob("*.md")} for folder in (DOCS, DOCS / "zh")
    )
    assert {name for name in english if not name.startswith("zh/")} - ENGLISH_ONLY == chinese


def shape_of(text: str) -> list[tuple]:
    """What both languages share of each section: level, pictures, blocks, flags and, of tables, rows and figures.

    A made table, between `<!-- name -->` and `<!-- end -->`, may be on one of the pages only.
    """
    text = re.sub(r"(\|.*\n\|.*\n)?<!-- (?!not run|file)[\w -]+ -->\n(.|\n)*?<!-- end -->\n", "", text)
    sections = []
    for level, section in re.findall(r"^(#+) (.*?)(?=^#+ |\Z)", _without_blocks(text), re.MULTILINE | re.DOTALL):
        rows = [row for row in section.splitlines() if row.lstrip().startswith("|")]
        figures = sorted(FIGURE.findall(re.sub(r"`[^`]*`", "", "\n".join(rows))))
        pictures = re.findall(r"images/([\w.-]+)\)", section)
        flags = sorted(set(re.findall(r"--[a-z][\w-]+", section)))
        sections.append((level, len(rows), section.count(BLOCK), pictures, figures, flags))
    return sections


BLOCK = "<block>"
FIGURE = re.compile(r"\d+(?:[.,]\d+)*(?![.,]?\d| ?(?:million|billion|[BM]\b|亿|万))")  # but for those told in words


def _without_blocks(text: str) -> str:
    return re.sub(r"^( *```+)\w*\n.*?^\1$", BLOCK, text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted((DOCS / "zh").rglob("*.md")), ids=lambda path: path.stem)
def test_chinese_pages_have_the_sections_tables_and_figures_of_the_english_ones(page):
    chinese, english = (shape_of(one.read_text("utf-8")) for one in (page, DOCS / page.relative_to(DOCS / "zh")))
    assert [one[0] for one in chinese] == [one[0] for one in english]
    for ours, theirs in zip(chinese, english, strict=True):
        assert ours == theirs


def test_made_pages_are_up_to_date():
    for name, made in make.PAGES.items():
        assert (DOCS / name).read_text(encoding="utf-8") == made(), "python docs/make.py writes them anew"


def test_the_site_builds_without_a_warning_and_has_every_page(tmp_path):
    """Dead links, dead anchors and pages that no menu names are warnings, and `--strict` fails on them."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not included in the" not in done.stderr + done.stdout, done.stderr
    for page in (*DOCS.rglob("*.md"), DOCS / "quickstart.md", DOCS / "zh/quickstart.md"):
        name = page.relative_to(DOCS).with_suffix("")
        assert (tmp_path / "site" / (name.parent if name.name == "index" else name) / "index.html").exists(), name


def test_the_builds_for_gpus_are_those_that_setup_installs():
    for text in (INSTALLATION, INSTALLATION_CN):
        for build in BUILDS:
            assert build.cuda in text and build.min_driver in text
        indexes = re.findall(r"-i (https://\S+)", text)
        assert indexes and set(indexes) <= {build.index_url for build in BUILDS}


def test_files_and_commands_that_are_named_exist():
    for text in (ENGLISH, CHINESE):
        for target in re.findall(r"\]\(([\w./]+)\)", text):
            assert (ROOT / target).exists(), target
        for path in re.findall(r"(?:examples|run_scripts|data/filelist|docs|requirements)/[\w./]+\.\w+", text):
            if "laion400m_en" not in path:
                assert (ROOT / path).exists(), path
        for words in re.findall(r"^ppldm (([\w-]+)(?: [\w-]+)?)", "\n".join(commands(text)), re.MULTILINE):
            assert COMMANDS.keys() & set(words), words


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_commands_of_the_docs_have_the_flags_that_they_are_given(path):
    text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    for words in (shlex.split(line)[1:] for line in commands(text) if line.startswith("ppldm ")):
        name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        if not getattr(load_command(name), "takes_words", False):
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
