"""One HTML file of charts, pictures and words. It loads nothing: pictures are in it; its policy forbids the rest."""

import base64
import io
from pathlib import Path

import numpy as np
from jinja2 import Environment
from markupsafe import Markup
from PIL import Image

from ... import __version__
from .charts import as_svg, draw_losses, draw_metrics, draw_quarters, draw_sweep
from .read_run import Run
from .sweep import Curve

MOST_STEPS = 8  # pictures of a strip
_MOST_WIDTH, _QUALITY = 900, 88
_PLAIN_BYTES = 100_000  # of a picture that is shown as it is


def make_page(runs: list[Run], curves: list[Curve]) -> str:
    """The whole file."""
    figures = []

    def svg(figure) -> Markup:
        figures.append(figure)
        return Markup(as_svg(figure, len(figures)))

    quarters = [(run.name, figure) for run in runs if (figure := draw_quarters(run))]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PAGE).render(
        title=", ".join(run.name for run in runs) or "guidance sweep",
        version=__version__,
        runs=runs,
        charts=[svg(figure) for figure in ([draw_losses(runs)] if runs else []) + draw_metrics(runs)],
        quarters=[(name if len(runs) > 1 else "", svg(figure)) for name, figure in quarters],
        sweep=svg(draw_sweep(curves)) if curves else None,
        curves=curves,
        facts=list({name: None for run in runs for name in run.facts}),
        differing=differing(runs),
        tags=list({tag: None for run in runs for tag in run.samples}),
        strip=strip,
        picture=data_url,
    )


def differing(runs: list[Run]) -> list[tuple[str, list]]:
    """(setting, its value in each run) of all settings that are not the same in all."""
    names = {name: None for run in runs for name in run.settings}
    found = [(name, [run.settings.get(name, "-") for run in runs]) for name in names]
    return [(name, values) for name, values in found if any(value != values[0] for value in values)]


def strip(samples: list[tuple[int, Path]]) -> list[tuple[int, str]]:
    """(step, picture as a data URL) of at most eight, evenly over the training, the first and the last among them."""
    chosen = np.linspace(0, len(samples) - 1, min(len(samples), MOST_STEPS)).round().astype(int)
    return [(samples[number][0], data_url(samples[number][1])) for number in chosen]


def data_url(path: Path) -> str:
    """A PNG as it is, a large one smaller and as JPEG."""
    content = path.read_bytes()
    if len(content) <= _PLAIN_BYTES:
        return "data:image/png;base64," + base64.b64encode(content).decode()
    with Image.open(io.BytesIO(content)) as picture:
        picture = picture.convert("RGB")
        picture.thumbnail((_MOST_WIDTH, 8 * _MOST_WIDTH))
        small = io.BytesIO()
        picture.save(small, format="JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(small.getvalue()).decode()


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>ppldm: {{ title }}</title>
<style>
 body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem; color: #222; }
 h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
 h3 { font-size: 1rem; margin: 1rem 0 .3rem; overflow-wrap: anywhere; }
 .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
 figure { margin: 0; min-width: 0; } figcaption { font-size: .85rem; color: #555; overflow-wrap: anywhere; }
 svg { width: 100%; height: auto; display: block; } .charts img { max-width: 100%; }
 .sweep { max-width: 46rem; margin-bottom: 1rem; }
 .strip { display: flex; gap: .5rem; overflow-x: auto; padding-bottom: .5rem; }
 .strip figure { flex: none; } .strip img { display: block; max-height: 24rem; max-width: min(85vw, 34rem); }
 .table { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
 th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0; border-top: 1px solid #ddd; }
 th { font-weight: 600; white-space: nowrap; } td { overflow-wrap: anywhere; min-width: 9rem; }
 .numbers td { min-width: 0; padding-right: .75rem; }
 pre { overflow-x: auto; background: #f5f5f5; padding: .75rem; font-size: .8rem; } summary { cursor: pointer; }
 footer { margin-top: 2rem; font-size: .85rem; color: #555; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if runs %}
<h2>Curves</h2>
<div class="charts">
{% for chart in charts %}<figure>{{ chart }}</figure>{% endfor %}
{% for name, chart in quarters %}
<figure>{{ chart }}{% if name %}<figcaption>{{ name }}</figcaption>{% endif %}</figure>
{% endfor %}
</div>
{% endif %}
{% if sweep %}
<h2>Guidance sweep</h2>
<div class="sweep"><figure>{{ sweep }}<figcaption>Each point is a guidance scale; bars are 95 % intervals.</figcaption>
</figure></div>
<div class="table"><table class="numbers">
<tr><th>model</th><th>guidance</th><th>{{ curves[0].x }}</th><th>{{ curves[0].y }}</th></tr>
{% for curve in curves %}{% for scale, x, y in curve.points %}
<tr><td>{{ curve.name }}</td><td>{{ "%g" | format(scale) }}</td>
{% for one in (x, y) %}
<td>{{ "%.4g" | format(one[0]) }}
{%- if one[1] != one[2] %} ({{ "%.4g to %.4g" | format(one[1], one[2]) }}){% endif %}</td>
{% endfor %}
</tr>
{% endfor %}{% endfor %}
</table></div>
{% endif %}
{% if tags %}
<h2>Pictures over training</h2>
{% for tag in tags %}{% for run in runs if tag in run.samples %}
<h3>{{ tag }}{% if runs | length > 1 %}: {{ run.name }}{% endif %}</h3>
<div class="strip">
{% for step, url in strip(run.samples[tag]) %}
<figure><img src="{{ url }}" alt="{{ tag }}, step {{ step }}"><figcaption>step {{ "{:,}".format(step) }}</figcaption>
</figure>
{% endfor %}
</div>
{% endfor %}{% endfor %}
{% endif %}
{% if runs %}
<h2>Data, machine and cost</h2>
<div class="table"><table>
{% if runs | length > 1 %}<tr><th></th>{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr>{% endif %}
{% for name in facts %}
<tr><th>{{ name }}</th>{% for run in runs %}<td>{{ run.facts.get(name, "") }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% for run in runs if run.buckets %}
<h3>Shapes of the rows{% if runs | length > 1 %}: {{ run.name }}{% endif %}</h3>
<div class="charts"><img src="{{ picture(run.buckets) }}" alt="rows by shape"></div>
{% endfor %}
{% if runs | length > 1 %}
<h2>Settings that differ</h2>
{% if differing %}
<div class="table"><table><tr><th></th>{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr>
{% for name, values in differing %}
<tr><th>{{ name }}</th>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% else %}<p>None.</p>{% endif %}
{% endif %}
{% if runs | selectattr("recipe") | list %}<h2>Recipe</h2>{% endif %}
{% for run in runs if run.recipe %}
<details{% if runs | length == 1 %} open{% endif %}>
<summary>{{ run.name }}</summary><pre>{{ run.recipe }}</pre></details>
{% endfor %}
{% endif %}
<footer>ppldm {{ version }}</footer>
</body>
</html>
"""
