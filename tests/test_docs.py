"""The READMEs say the same in both languages, and nothing in them names what is not there."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from ppldm.cli.main import COMMANDS, load_command, parse_flags
from ppldm.config.recipe import defaults
from ppldm.families.ldm import LdmConfig
from ppldm.training.commands.arguments import make_parser
from ppldm.utils.machine.builds import BUILDS

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README_cn.md"))


def commands(text: str) -> list[str]:
    """The lines of all fenced blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]


def flag_rows(text: str) -> list[list[str]]:
    """The cells of each row of the flags' table."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `--")]
    return [[cell.strip() for cell in row] for row in rows]


def test_both_languages_have_the_same_sections_and_commands():
    headings = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (ENGLISH, CHINESE)]
    assert headings[0] == headings[1]
    assert commands(ENGLISH) == commands(CHINESE)
    assert [row[0].replace("、", ", ") for row in flag_rows(CHINESE)] == [row[0] for row in flag_rows(ENGLISH)]
    assert [row[1] for row in flag_rows(CHINESE)] == [row[1] for row in flag_rows(ENGLISH)]


def test_flags_of_the_table_are_flags_of_both_scripts_and_aliases_are_aliases():
    rows = flag_rows(ENGLISH)
    assert len(rows) > 25
    for loop in (True, False):
        actions = make_parser(loop)._option_string_actions
        for flags, alias, *_ in rows:
            names = re.findall(r"`(--\w+)`", flags)
            assert names and all(name in actions for name in names), flags
            if alias:
                assert actions[alias.strip("`")] is actions[names[0]], alias


@pytest.mark.parametrize("loop", [True, False])
def test_defaults_of_the_table_are_the_defaults(loop):
    usual = {name: value for known in defaults(LdmConfig, loop).values() for name, value in known.items()}
    for flags, _, default, _ in flag_rows(ENGLISH):
        names = re.findall(r"--(\w+)", flags)
        own = re.split(r"; loop ", default)[-1] if loop else default.split(";")[0]
        values = [value.strip().strip("`") for value in own.split(", ")]
        for name, value in zip(names, values, strict=False):
            if re.fullmatch(r"-?[\d.e-]+", value):
                assert float(usual[name]) == float(value), (name, value)


def test_the_builds_for_gpus_are_those_that_setup_installs():
    for text in (ENGLISH, CHINESE):
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


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "cn"])
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
