"""The tables of docs/config.md are those of the code. `python tests/config/test_docs_tables.py` writes them."""

from pathlib import Path

from ppldm.config.foreign import SYSTEMS, markdown_table
from ppldm.config.presets import list_presets

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def with_tables(text: str) -> str:
    rows = "\n".join(f"| `{name}` | {what} |" for name, what in list_presets().items())
    for name, table in [("presets", rows), *((system, markdown_table(system)) for system in SYSTEMS)]:
        head, mark, rest = text.partition(f"<!-- {name} -->\n")
        text = head + mark + table + "\n" + rest[rest.index("<!-- end -->") :]
    return text


def test_the_tables_are_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, f"python {Path(__file__).relative_to(PAGE.parents[1])} writes them anew"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
