"""Small folders of pictures as parts of a chosen size: their rows one after another, whatever folder they lie in.

Each folder makes parts of its own by default, so that a part depends on one folder only; thousands of folders with a
few pictures each then make thousands of small parts. Packed, a part takes the next rows of as many folders as it needs,
and each row says in its metadata, `folder`, which one it is from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...data.formats.row import Row
from ...utils.jobs import Piece
from .units import FolderUnit, SourceRow, Span, Unit

# In place of the source of a part whose rows have several.
PACKED = "*"


def place_of(meta: dict, source: str) -> str:
    """What a row was made from: `source`, that of its part, or its own folder where the part was packed."""
    return str(meta.get("folder", "")) if source == PACKED else source


@dataclass(frozen=True)
class PackedUnit:
    """Rows of several folders. `pieces`: the folders, relative to `path`, and the span of each."""

    path: Path
    pieces: tuple[tuple[str, Span], ...]
    has_control: bool = False

    def spans(self, rows: int) -> list[Span]:
        """All of it, which has been cut to size."""
        total = sum(span.rows for _, span in self.pieces)
        return [Span(0, total, total)]

    def input_pieces(self, span: Span) -> list[Piece]:
        return [
            replace(piece, name=f"{name}/{piece.name}")
            for name, rows in self.pieces
            for piece in FolderUnit(self.path / name, self.has_control).input_pieces(rows)
        ]

    def read(self, span: Span) -> Iterator[SourceRow]:
        for name, piece in self.pieces:
            for row in FolderUnit(self.path / name, self.has_control).read(piece):
                yield row if name == "." else SourceRow(row.key, partial(_load_with_folder, row, name))


def _load_with_folder(source_row: SourceRow, folder: str) -> Row:
    """folder: from that of the whole source, which the row lies in. Raises RowError as the row itself."""
    row = source_row.load()
    return replace(row, meta=row.meta | {"folder": folder})


def pack(cut: Sequence[tuple[Unit, Span]], root: Path, rows: int) -> list[tuple[Unit, Span]]:
    """Units and their spans with those of folders, `root` or below it, joined to `rows` rows each; only the last before
    a unit of another kind, or of all, may have fewer. Order stays."""
    packed: list[tuple[Unit, Span]] = []
    pieces: list[tuple[str, Span]] = []

    def flush() -> None:
        if pieces:
            unit = PackedUnit(root, tuple(pieces), cut[0][0].has_control)
            packed.extend((unit, span) for span in unit.spans(rows))
            pieces.clear()

    for unit, span in cut:
        if not isinstance(unit, FolderUnit):
            flush()
            packed.append((unit, span))
            continue
        start = span.start
        while start < span.stop:
            room = rows - sum(piece.rows for _, piece in pieces)
            stop = min(span.stop, start + room)
            pieces.append((unit.path.relative_to(root).as_posix(), Span(start, stop, stop - start)))
            start = stop
            if room == pieces[-1][1].rows:
                flush()
    flush()
    return packed
