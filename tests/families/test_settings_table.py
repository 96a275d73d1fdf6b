"""docs/settings.md is what the code makes of its options."""

import re
import subprocess
import sys
from pathlib import Path

from ppldm.config.recipe import schema_of
from ppldm.families.base import get_family, list_families

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/settings.md"


def test_the_page_is_up_to_date():
    command = [sys.executable, "-m", "ppldm.families.settings.table"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == PAGE.read_text(encoding="utf-8"), f"stale; run {' '.join(command[1:])} > docs/settings.md"


def test_every_option_has_one_row_with_its_default_and_no_path_of_this_machine():
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)`(.*)\|$", text, re.MULTILINE)
    keys = {one.key for name in list_families() for known in schema_of(get_family(name).Config).values()
            for one in known.values()}  # fmt: skip
    assert {key for key, _ in rows} == keys
    assert len(rows) == len(set(rows)), "families that share an option share its row"
    assert "| Trainer 42, loop 23 |" in text and str(ROOT) not in text
