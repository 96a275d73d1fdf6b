"""The page of runs: charts, pictures and words."""

from pathlib import Path

import numpy as np
from PIL import Image

from ...utils.web import page as web_page
from .charts import draw_losses, draw_metrics, draw_quarters, draw_sweep
from .read_run import Run
from .sweep import Curve

MOST_STEPS = 8  # pictures of a strip
_MOST_WIDTH = 900
_PLAIN_BYTES = 100_000  # of a picture that is shown as it is


def make_page(runs: list[Run], curves: list[Curve]) -> str:
    """The whole file."""
    quarters = [(run.name, figure) for run in runs if (figure := draw_quarters(run))]
    return web_page.render(
        _BODY,
        title=", ".join(run.name for run in runs) or "guidance sweep",
        runs=runs,
        charts=([draw_losses(runs)] if runs else []) + draw_metrics(runs),
        quarters=[(name if len(runs) > 1 else "", figure) for name, figure in quarters],
        sweep=draw_sweep(curves) if curves else None,
        curves=curves,
        facts=list({name: None for run in runs for name in run.facts}),
        compared=[(group, differing(group)) for group in of_one_kind(runs) if len(group) > 1],
        tags=list({tag: None for run in runs for tag in run.samples}),
        strip=strip,
        picture=data_url,
    )


def of_one_kind(runs: list[Run]) -> list[list[Run]]:
    """Runs whose settings can be compared: those of autoencoders apart from those of models that draw."""
    kinds: dict[bool, list[Run]] = {}
    for run in runs:
        kinds.setdefault(run.settings.get("family") == "autoencoder", []).append(run)
    return list(kinds.values())


def differing(runs: list[Run]) -> list[tuple[str, list]]:
    """(setting, its value in each run) of all settings that are not the same in all; None where a run sets nothing,
    which is the same whether or not its family has the setting."""
    names = {name: None for run in runs for name in run.settings}
    found = [(name, [run.settings.get(name) for run in runs]) for name in names]
    return [(name, values) for name, values in found if any(value != values[0] for value in values)]


def strip(samples: list[tuple[int, Path]]) -> list[tuple[int, str]]:
    """(step, picture as a data URL) of at most eight, evenly over the training, the first and the last among them."""
    chosen = np.linspace(0, len(samples) - 1, min(len(samples), MOST_STEPS)).round().astype(int)
    return [(samples[number][0], data_url(samples[number][1])) for number in chosen]


def data_url(path: Path) -> str:
    """A PNG as it is, a large one smaller and as JPEG."""
    content = path.read_bytes()
    if len(content) <= _PLAIN_BYTES:
        return web_page.url_of(content, "png")
    with Image.open(path) as picture:
        return web_page.data_url(picture, (_MOST_WIDTH, 8 * _MOST_WIDTH))


_BODY = """{% extends "page" %}
{% block style %}
 @media (max-width: 40rem) {
  .facts table { table-layout: fixed; width: 100%; }
  .facts th { white-space: normal; overflow-wrap: anywhere; } .facts td { min-width: 0; } }
 .sweep { max-width: 46rem; margin-bottom: 1rem; }
 .strip { display: flex; gap: .5rem; overflow-x: auto; padding-bottom: .5rem; }
 .strip figure { flex: none; } .strip img { display: block; max-height: 24rem; max-width: min(85vw, 34rem); }
{% endblock %}
{% block body %}
{% if runs %}
<h2>Curves</h2>
<div class="charts">
{% for chart in charts %}<figure>{{ svg(chart) }}</figure>{% endfor %}
{% for name, chart in quarters %}
<figure>{{ svg(chart) }}{% if name %}<figcaption>{{ name }}</figcaption>{% endif %}</figure>
{% endfor %}
</div>
{% endif %}
{% if sweep %}
<h2>Guidance sweep</h2>
<div class="sweep"><figure>{{ svg(sweep) }}
<figcaption>Each point is a guidance scale; bars are 95 % intervals.</figcaption>
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
<div class="table facts"><table>
{% if runs | length > 1 %}<tr><th></th>{% for run in runs %}<th>{{ run.name }}</th>{% endfor %}</tr>{% endif %}
{% for name in facts %}
<tr><th>{{ name }}</th>{% for run in runs %}<td>{{ run.facts.get(name, "") }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% for run in runs if run.buckets %}
<h3>Shapes of the rows{% if runs | length > 1 %}: {{ run.name }}{% endif %}</h3>
<div class="charts"><img src="{{ picture(run.buckets) }}" alt="rows by shape"></div>
{% endfor %}
{% if compared %}<h2>Settings that differ</h2>{% endif %}
{% for group, differing in compared %}
{% if differing %}
<div class="table facts"><table><tr><th></th>{% for run in group %}<th>{{ run.name }}</th>{% endfor %}</tr>
{% for name, values in differing %}
<tr><th>{{ name }}</th>{% for value in values %}<td>{{ "-" if value is none else value }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% else %}<p>None.</p>{% endif %}
{% endfor %}
{% if runs | selectattr("recipe") | list %}<h2>Recipe</h2>{% endif %}
{% for run in runs if run.recipe %}
<details{% if runs | length == 1 %} open{% endif %}>
<summary>{{ run.name }}</summary><pre>{{ run.recipe }}</pre></details>
{% endfor %}
{% endif %}
{% endblock %}
"""
