"""One HTML file that needs no other: what the reports of this package have in common.

A page loads nothing: pictures are in it, and its policy forbids the rest. It is light or dark as the reader's system
is, and fits a phone. Charts are matplotlib's, as SVG whose text stays text and whose black and white are the page's.
"""

import base64
import io
import re
from pathlib import Path

from jinja2 import DictLoader, Environment
from markupsafe import Markup
from PIL import Image

from ... import __version__

_HERE = Path(__file__).parent
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#777777")  # Okabe and Ito
STYLE = _HERE.joinpath("page.css").read_text("utf-8")  # of all pages


def render(body: str, title: str = "", **values) -> str:
    """The whole file. body: a Jinja template, of a whole page or, where it extends "page", of what stands between
    heading and footer; `{% block style %}` then adds to the style. `svg(figure)` draws one. {{ client }} and
    {{ client_style }} are what pages with a script have in common. Everything else is escaped."""
    numbers = iter(range(1, 1_000_000))
    known = {name: _HERE.joinpath(name).read_text("utf-8") for name in ("page.html", "client.js", "client.css")}
    loader = DictLoader({"page": known["page.html"], "body": body})
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    environment.policies["json.dumps_kwargs"] = {}  # objects in JSON keep their order
    environment.globals["svg"] = lambda figure: Markup(as_svg(figure, next(numbers)))
    own = {"style": Markup(STYLE), "client": Markup(known["client.js"]), "client_style": Markup(known["client.css"])}
    return environment.get_template("body").render(**{**own, "version": __version__, "title": title, **values})


def new_figure(title: str, x: str = ""):
    """(figure, axes) of one small chart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title.replace("_", " "), fontsize=11)
    axes.set_xlabel(x, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure, file, kind: str) -> None:
    """Write a figure as png or svg, the same bytes each time."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ppldm", "font.family": "sans-serif"}):
        figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})


def as_svg(figure, number: int) -> str:
    """An <svg> element as wide as its place. number: of the figure in its page, for ids that no other has."""
    text = io.StringIO()
    save_figure(figure, text, "svg")
    svg = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue()[text.getvalue().index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>f{number}-", svg)
    for colour, name in (("000000", "ink"), ("ffffff", "paper")):
        svg = re.sub(rf"\b(fill|stroke): #{colour}", rf"\1: var(--{name})", svg)
    return re.sub(r'^(<svg [^>]*?) width="[^"]*"', r"\1", re.sub(r'^(<svg [^>]*?) height="[^"]*"', r"\1", svg))


def data_url(picture: Image.Image, side: tuple[int, int], quality: int = 88) -> str:
    """A picture as JPEG inside a URL, shrunk to (width, height) where it is larger."""
    picture = picture.convert("RGB")
    picture.thumbnail(side, Image.Resampling.LANCZOS)
    small = io.BytesIO()
    picture.save(small, format="JPEG", quality=quality)
    return url_of(small.getvalue(), "jpeg")


def url_of(content: bytes, kind: str) -> str:
    """An encoded picture of a kind ("png") as a URL."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
