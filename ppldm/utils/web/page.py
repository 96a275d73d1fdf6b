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


# What all pages look like.
STYLE = """\
 :root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #555; --line: #ddd; --block: #f5f5f5;
  --bad: #b00020; }
 @media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #181a1b; --faint: #a5a5a5; --line: #3a3d3f; --block: #232627;
   --bad: #ff8a80; } }
 body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
 h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
 h3 { font-size: 1rem; margin: 1rem 0 .3rem; overflow-wrap: anywhere; }
 .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
 figure { margin: 0; min-width: 0; } figcaption { font-size: .85rem; color: var(--faint); overflow-wrap: anywhere; }
 svg { width: 100%; height: auto; display: block; fill: var(--ink); } .charts img { max-width: 100%; }
 .table { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
 th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0; border-top: 1px solid var(--line); }
 th { font-weight: 600; white-space: nowrap; } td { overflow-wrap: anywhere; min-width: 9rem; }
 .numbers td { min-width: 0; padding-right: .75rem; }
 pre { overflow-x: auto; background: var(--block); padding: .75rem; font-size: .8rem; } summary { cursor: pointer; }
 footer { margin-top: 2rem; font-size: .85rem; color: var(--faint); }
"""


def render(body: str, title: str = "", **values) -> str:
    """The whole file. body: a Jinja template, of a whole page or, where it extends "page", of what stands between
    heading and footer; `{% block style %}` then adds to the style. `svg(figure)` draws one. {{ client }} and
    {{ client_style }} are what pages with a script have in common. Everything else is escaped."""
    numbers = iter(range(1, 1_000_000))
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=DictLoader({"page": _PAGE, "body": body})
    )
    environment.policies["json.dumps_kwargs"] = {}  # objects in JSON keep their order
    environment.globals["svg"] = lambda figure: Markup(as_svg(figure, next(numbers)))
    known = {"style": Markup(STYLE), "version": __version__}
    for name, file in (("client", "client.js"), ("client_style", "client.css")):
        known[name] = Markup(_HERE.joinpath(file).read_text("utf-8"))
    return environment.get_template("body").render(**{**known, "title": title, **values})


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
    svg = re.sub(r"\b(fill|stroke): #(000000|ffffff)", _in_colours_of_the_page, svg)
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


def _in_colours_of_the_page(found: re.Match) -> str:
    return f"{found.group(1)}: var({'--ink' if found.group(2) == '000000' else '--paper'})"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>ppldm: {{ title }}</title>
<style>
{{ style }}{% block style %}{% endblock %}
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% block body %}{% endblock %}
<footer>ppldm {{ version }}</footer>
</body>
</html>
"""
