"""Thirty places that a newcomer looks for are where they are said to be.

Somebody who sees only the names of folders and files is to find 28 of them at the first try.
"""

import ast
import csv
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "ppldm"


def test_each_place_is_where_it_is_said_to_be():
    with open(Path(__file__).with_name("places.tsv"), newline="", encoding="utf-8") as file:
        places = list(csv.DictReader(file, delimiter="\t"))
    assert len(places) == 30 and len({place["question"] for place in places}) == 30
    for place in places:
        tree = ast.parse((PACKAGE / place["file"]).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert place["name"] in names or not place["name"], place
