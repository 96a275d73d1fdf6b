"""What a list of data may name: formats, and layouts, the column orders of published part files. A layout is named, by
a list's `layout=` option or by `--layout`; it is never guessed from a path. `layout=control` says of any format that
its rows have a second image, the control image: of parts their fourth column, of tables the first of CONTROL_COLUMNS
that is there, of files that are one sample `0000.control.png` beside `0000.jpg`. A row without one cannot be used."""

from dataclasses import dataclass

from ...utils.errors import ConfigError
from ...utils.text import nearest


@dataclass(frozen=True)
class Layout:
    """Which columns of a line, counted from 0, say what. meta: column of a JSON object of metadata. caption_keys: the
    caption is in that, under the first of these keys that holds text; "" where none does. removed: what to delete from
    a caption. separator: it divides several captions of one picture. control: column of a second image."""

    caption: int
    image: int
    meta: int | None = None
    caption_keys: tuple[str, ...] = ()
    removed: str = ""
    separator: str = ""
    control: int | None = None

    @property
    def last_text_column(self) -> int:
        """The last column that is not the image."""
        return max(self.caption, -1 if self.meta is None else self.meta)

    @property
    def num_columns(self) -> int:
        """How many columns a line must have at least."""
        return max(self.last_text_column, self.image, self.control or 0) + 1


@dataclass(frozen=True)
class Format:
    """A kind of files that rows are read from. reader: `module:class` in this folder, a kind of `base.IndexedRows`,
    imported when a list names the format. names: what its files are called in a folder without a list (a regular
    expression); None: a folder is one file of rows. holds_rows: a file's bytes are its rows, so that two equal files
    are the same data. in_store: rows need no other file, so that a store may have them."""

    reader: str
    names: str | None = None
    holds_rows: bool = False
    in_store: bool = False


FORMATS = {  # in the order in which a folder is tried
    "part": Format("part:Part", r"part-.+", holds_rows=True, in_store=True),
    "webdataset": Format("tar:TarShard", r".+\.tar", holds_rows=True, in_store=True),
    "parquet": Format("parquet_table:ParquetTable", r".+\.parquet", holds_rows=True, in_store=True),
    "mds": Format("mds:MdsShard", r".+\.mds(\.zstd)?", holds_rows=True, in_store=True),
    "csv": Format("csv_table:CsvTable", r"metadata\.csv"),
    "folder": Format("folder:ImageFolder"),
}

DEFAULT_LAYOUT, CONTROL_LAYOUT = "default", "control"
CONTROL_COLUMNS = ("control", "conditioning_image", "control_image")

LAYOUTS = {
    DEFAULT_LAYOUT: Layout(caption=0, image=2, meta=1),
    CONTROL_LAYOUT: Layout(caption=0, image=2, meta=1, control=3),
    "laion400m": Layout(caption=0, image=2, meta=1),
    "laion_aes": Layout(caption=2, image=5, meta=2, caption_keys=("caption_en", "blip_caption_en")),
    "alt_aesthetic": Layout(caption=1, image=4),
    "laion_aesthetic": Layout(caption=10, image=12),
    "cc_15m_tag_watermark_1024": Layout(caption=0, image=4),
    "laion400m_1024": Layout(caption=0, image=4),
    "cc_tag_watermark": Layout(caption=0, image=4, removed="<mark>"),
    "cc_12m_tag_watermark": Layout(caption=0, image=4, removed="<mark>"),
    "alt-text2image_gen_filted_data_shuffle_watermark": Layout(caption=1, image=0),
    "image_search_key_201810": Layout(caption=1, image=5, removed="\x01", separator="|"),
    "yfcc_en_zh": Layout(caption=0, image=4),
    "vc": Layout(caption=6, image=3),
}


def get_layout(name: str) -> Layout:
    """The layout of a name. Raises ConfigError with the names that there are."""
    if name not in LAYOUTS:
        near = nearest(name, LAYOUTS)
        hint = f"did you mean {near}? known" if near else "known"
        raise ConfigError(f"unknown layout {name!r}; {hint}: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def index_layout(name: str, format: str) -> str:
    """The layout after which index and columns are named: a second image of parts changes nothing that they tell."""
    return DEFAULT_LAYOUT if (format, name) == ("part", CONTROL_LAYOUT) else name
