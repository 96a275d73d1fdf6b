"""The page of a data set: what `ppldm stats` counts, the facts that rows carry, their way here, and some of them.

Their way leads from metadata to training steps: the records of preparation, what stats has read, a run's skips. In each
stage, rows in = rows out + rows dropped, by reason; of a run the rows are those that it drew, epoch after
epoch, and rows out its samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...config.data import DataOptions
from ...data.text.coverage import Coverage
from ...prepare.provenance.accounts import read_stages
from ...training.monitor.metrics import METRICS_FILE, read_metrics, skipped_rows
from ...utils.errors import ConfigError, DataError, OutputError
from ...utils.files import atomic_write, local_path
from ...utils.log import get_logger, progress
from ...utils.text import count_of, escape
from ...utils.web.page import data_url, new_figure, render
from ..buckets import preview_shapes
from ..histograms import QUANTILES, draw_histogram, quantiles
from ..measure import CONTROL, MEASURES, Measured
from ..parts import Indexed
from ..show import choose_rows, read_tile
from .facts import MOST_ROWS, SHOWN

READ = "read"
NUM_ROWS = 200  # that are shown
_SEED = 0  # of their choice
_SIDE, _QUALITY = 192, 80  # pixels, of JPEG
_SHEET_WIDTH = 1200  # pixels
_CAPTION_LENGTH = 600  # characters that are shown


@dataclass(frozen=True)
class Step:
    """One stage of the way. dropped: rows by reason, the most frequent first. place: the folder of its records."""

    name: str
    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    place: str = ""


def find_way(parts: Iterable[Path], records: Iterable[str], rows: int, skipped: dict[str, int]) -> list[Step]:
    """The stages that parts went through, the first one first, as far as records of them are found: beside the parts
    and in the folders `records`, runs' folders among them. rows, skipped: what was read of the parts, and what of it
    is bad, by reason. Raises ConfigError for a folder without records, DataError."""
    named = [local_path(one) for one in records]
    runs = [folder for folder in named if (folder / METRICS_FILE).is_file()]
    for folder in named:
        if folder not in runs and not read_stages([folder]):
            raise ConfigError(
                f"--records {folder} holds no records; name the folder that filter, download, convert, pipeline or "
                "train has written"
            )
    beside = (folder for path in parts for folder in (path.parent.parent, path.parent))
    way = [
        Step(name, result.rows_in, result.rows_out, _sorted(result.dropped), str(folder))
        for name, folder, result in read_stages([*named, *dict.fromkeys(beside)])
    ]
    way.append(Step(READ, rows, rows - sum(skipped.values()), _sorted(skipped)))
    return way + [step for run in runs if (step := _read_run(run))]


def _read_run(folder: Path) -> Step | None:
    """What a run drew; None before its first line that says its speed."""
    records = [one for one in read_metrics(folder / METRICS_FILE) if one.get("images_per_second")]
    if not records:
        return None
    last = records[-1]
    samples = last["global_step"] * round(last["images_per_second"] * last["avg_batch_cost"])
    dropped = skipped_rows(last)
    return Step("train", samples + sum(dropped.values()), samples, _sorted(dropped), str(folder))


def _sorted(dropped: dict[str, int]) -> dict[str, int]:
    return dict(sorted(((name, rows) for name, rows in dropped.items() if rows), key=lambda one: (-one[1], one[0])))


def write_page(
    path: str,
    names: Sequence[str],
    indexed: Indexed,
    found: Measured,
    records: Sequence[str],
    tokenizers: tuple[Sequence[str], int],
    shapes: DataOptions,
) -> dict:
    """Write the page of parts to a file and return its numbers, JSON-ready: {facts, scores, tokens, way, shapes}.

    names: of the data. records: folders in which the way of rows is looked for as well. tokenizers: by name those of
    `found.coverages`, and the tokens of a caption. shapes: settings of a preview. Raises ConfigError, DataError,
    OutputError.
    """
    parts = [part.path for part in (*indexed.rows, *indexed.bad)]
    way = find_way(parts, records, indexed.num_rows, found.skipped)
    scores = found.facts.shown_scores
    coverages = list(zip(tokenizers[0], found.coverages, strict=True))
    preview, sheet = _preview(indexed, shapes)
    report = {
        "facts": found.facts.report(),
        "scores": {name: {"rows": values.total(), "quantiles": quantiles(values)} for name, values in scores.items()},
        "tokens": [_describe_tokens(name, one, tokenizers[1]) for name, one in coverages],
        "way": [asdict(step) for step in way],
        "shapes": preview,
    }
    lengths = {f"caption, tokens of {name}": one.lengths for name, one in coverages}
    measures = {title: found.counts[name] for name, title in (MEASURES | CONTROL).items() if found.counts[name]}
    html = render(
        _BODY,
        title=", ".join(names),
        rows=indexed.num_rows,
        good=indexed.num_rows - found.skipped.total(),
        parts=len(parts),
        bad_parts=list(indexed.bad.values()),
        measures=[(title, quantiles(values)) for title, values in (measures | lengths).items() if values],
        quantile_names=[{0: "least", 0.5: "median", 1: "most"}.get(one, f"{one:.0%}") for one in QUANTILES],
        charts=[_chart(title, values) for title, values in (measures | lengths).items() if values],
        score_charts=[_chart(name, values) for name, values in scores.items()],
        sheet=sheet,
        resolution=shapes.resolution,
        pictures=_read_pictures(indexed),
        stride=found.facts.stride,
        limits={"shown": SHOWN, "looked": MOST_ROWS, "max_length": tokenizers[1]},
        count_of=count_of,
        escape=escape,
        **report,
    )
    try:
        with atomic_write(local_path(path)) as file:
            file.write(html.encode("utf-8", "replace"))
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another --html") from error
    get_logger().info("page: %s", path)
    return report


def _describe_tokens(name: str, coverage: Coverage, max_length: int) -> dict:
    cut = sum(count for length, count in coverage.lengths.items() if length > max_length)
    found = {"captions": coverage.captions, "cut": cut, "unknown_share": coverage.unknown_share}
    found |= {"median": coverage.length_at(0.5), "longest": coverage.length_at(1)}
    unknown = [word for word, _ in coverage.unknown.most_common(10)]
    return {"tokenizer": name, "max_length": max_length, **found, "unknown": unknown}


def _preview(indexed: Indexed, shapes: DataOptions) -> tuple[dict, str]:
    """(which rows get which shape, or {"error": why none does}; a URL of their contact sheet)."""
    try:
        report, draw = preview_shapes(indexed, shapes)
    except DataError as error:
        return {"error": str(error)}, ""
    return report, data_url(draw(), (_SHEET_WIDTH, 10 * _SHEET_WIDTH), _QUALITY)


def _chart(title: str, values):
    figure, axes = new_figure(title)
    draw_histogram(axes, values)
    return figure


def _read_pictures(indexed: Indexed) -> list[tuple[str, int, int, str, str]]:
    """(URL of the picture, "" of a bad row; pixels that it is shown wide; the factor by which that enlarges it;
    caption, or why the row is bad; which row it is) of rows chosen at random, in their order."""
    found = []
    rows = choose_rows(indexed.num_rows, NUM_ROWS, _SEED) if indexed.num_rows else []
    with progress(total=len(rows), desc="pictures", unit="row", delay=1) as bar:
        for row in sorted(rows):
            image, caption, place = read_tile(indexed, row)
            if len(caption) > _CAPTION_LENGTH:
                caption = caption[:_CAPTION_LENGTH] + "…"
            factor = max(1, _SIDE // max(image.size)) if image else 1
            url = data_url(image, (_SIDE, _SIDE), _QUALITY) if image else ""
            found.append((url, min(_SIDE, factor * image.width) if image else 0, factor, caption, place))
            bar.update()
    return found


_BODY = """{% extends "page" %}
{% macro kept(counts, total) %}
<div class="table"><table class="bars">
{% for name, count in counts.items() %}
<tr><td>{{ escape(name) or "(empty)" }}</td>
<td class="bar"><i style="width:{{ "%.1f" | format(100 * count / (total or 1)) }}%"></i></td>
<td class="n">{{ "{:,}".format(count) }}</td>
<td class="n">{{ "%.1f" | format(100 * count / (total or 1)) }}&#8239;%</td></tr>
{% endfor %}
</table></div>
{% endmacro %}
{% block style %}
 .bars { width: 100%; max-width: 46rem; table-layout: fixed; } .bars td { min-width: 0; width: 36%; }
 .bars td.bar { width: 30%; vertical-align: middle; } .bars td.n { width: 17%; }
 .numbers td:first-child { min-width: 7rem; } .charts { margin-top: 1rem; }
 .bars i { display: block; height: .7rem; min-width: 1px; background: #4477aa; } .bad i { background: #c44; }
 th.n, td.n { text-align: right; white-space: nowrap; min-width: 0; padding-right: .5rem;
  font-variant-numeric: tabular-nums; }
 .note { font-size: .85rem; color: var(--faint); max-width: 46rem; margin: .3rem 0 .6rem; }
 .two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
 .two > div { min-width: 0; }
 .rows { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(45%, 12rem), 1fr)); gap: 1rem; }
 .rows img { display: block; max-width: 100%; height: auto; border: 1px solid var(--line); }
 .rows .large { image-rendering: pixelated; }
 .rows .caption { display: block; color: var(--ink); } .rows .none { color: #c44; }
 .sheet { overflow-x: auto; } .sheet img { max-width: none; }
{% endblock %}
{% block body %}
<p>{{ "{:,}".format(rows) }} rows in {{ count_of(parts, "part") }}, {{ "{:,}".format(good) }} of them good.</p>
{% for error in bad_parts[:10] %}<p class="note">Cannot be opened: {{ escape(error) }}</p>{% endfor %}
{% if bad_parts | length > 10 %}<p class="note">… and {{ bad_parts | length - 10 }} more.</p>{% endif %}

<h2>The way of the rows</h2>
<p class="note">Of each stage with records on this machine: rows in = rows out + rows dropped. Stages may cover more
than these parts. Of a run, rows are those drawn, epoch after epoch.</p>
{% for step in way %}
<h3>{{ step.name }}: {{ "{:,}".format(step.rows_in) }} in, {{ "{:,}".format(step.rows_out) }} out</h3>
{% if step.place %}<p class="note">{{ escape(step.place) }}</p>{% endif %}
{{ kept({"out": step.rows_out}, step.rows_in) }}
{% if step.dropped %}<div class="bad">{{ kept(step.dropped, step.rows_in) }}</div>{% endif %}
{% endfor %}

<h2>Sizes and captions</h2>
<div class="table"><table class="numbers">
<tr><th></th>{% for name in quantile_names %}<th class="n">{{ name }}</th>{% endfor %}</tr>
{% for title, values in measures %}
<tr><td>{{ escape(title) }}</td>{% for value in values %}<td class="n">{{ "%g" | format(value) }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
<div class="charts">
{% for chart in charts %}<figure>{{ svg(chart) }}</figure>{% endfor %}
</div>

<h2>Captions that are cut</h2>
{% for one in tokens %}
<p>{{ escape(one.tokenizer) }}: {{ "{:,}".format(one.cut) }} of {{ "{:,}".format(one.captions) }} captions
({{ "%.1f" | format(100 * one.cut / (one.captions or 1)) }} %) have more than {{ one.max_length }} tokens and are cut
there. The median has {{ one.median }}, the longest {{ one.longest }}. Unknown words:
{{ "%.1f" | format(100 * one.unknown_share) }} %
{%- if one.unknown %} ({{ escape(one.unknown | join(", ")) }}){% endif %}.</p>
{% else %}<p class="note">No tokenizer was named; add --tokenizer FOLDER, several if you like.</p>{% endfor %}

<h2>Shapes</h2>
{% if shapes.error %}<p class="note">At --resolution {{ resolution }}: {{ escape(shapes.error) }}.
Another resolution is previewed by --settings resolution=N.</p>{% else %}
<p class="note">What --buckets would make of the rows at --resolution {{ resolution }}
({{ "%.1f" | format(100 * shapes.cut) }} % of the area is cut away); --buckets and --settings ask for others.
Dark in the preview: what is cut away.</p>
{% set ns = namespace(shapes={}) %}
{% for one in shapes.shapes %}{% set _ = ns.shapes.update({"%d x %d, %.1f %% cut away" | format(one.width, one.height,
 100 * one.cut): one.rows}) %}{% endfor %}
{{ kept(ns.shapes, rows) }}
{% if shapes.skipped %}<div class="bad">{{ kept(shapes.skipped, rows) }}</div>{% endif %}
<p></p><div class="sheet"><img src="{{ sheet }}" alt="rows of every shape"></div>
{% endif %}

<h2>What rows carry</h2>
<p class="note">{% if stride == 1 %}Over all {{ "{:,}".format(facts.looked) }} good rows.{% else %}Over a sample:
one row in {{ stride }} of each part, {{ "{:,}".format(facts.looked) }} good rows, since there are more than
{{ "{:,}".format(limits.looked) }}.{% endif %} Tables end after {{ limits.shown }} lines.</p>
<div class="two">
<div><h3>Languages of captions, by script and commonest words</h3>
{{ kept(facts.languages, facts.captions) }}</div>
{% for name, title in (("said", "Languages that the rows name"), ("domains", "Domains"), ("licences", "Licences")) %}
{% if facts[name] %}<div><h3>{{ title }}
{%- if name in facts.different %}: {{ "{:,}".format(facts.different[name]) }} different{% endif %}</h3>
{{ kept(facts[name], facts.looked) }}</div>{% endif %}
{% endfor %}
{% if facts.fields %}<div><h3>Fields of the metadata</h3>{{ kept(facts.fields, facts.looked) }}</div>{% endif %}
</div>
{% if score_charts %}
<h3>Scores, to three digits</h3>
<div class="table"><table class="numbers">
<tr><th></th><th class="n">rows</th>{% for name in quantile_names %}<th class="n">{{ name }}</th>{% endfor %}</tr>
{% for name, one in scores.items() %}
<tr><td>{{ escape(name) }}</td><td class="n">{{ "{:,}".format(one.rows) }}</td>
{% for value in one.quantiles %}<td class="n">{{ "%g" | format(value) }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
<div class="charts">{% for chart in score_charts %}<figure>{{ svg(chart) }}</figure>{% endfor %}</div>
{% endif %}

<h2>Copies</h2>
<div class="table"><table class="numbers">
<tr><th></th><th class="n">rows with one</th><th class="n">different</th><th class="n">that come again</th>
<th class="n">rows too many</th><th></th></tr>
{% for name, one in facts.copies.items() %}
<tr><td>{{ name }}</td>{% for what in ("rows", "distinct", "repeated", "extra") %}
<td class="n">{{ "{:,}".format(one[what]) }}</td>{% endfor %}
<td>{% if one.sampled_share < 1 %}estimated from {{ "%.3g" | format(100 * one.sampled_share) }} % of the values
{%- endif %}</td></tr>
{% endfor %}
</table></div>
<p class="note">Exact copies, by what rows carry; rows too many are those beyond the first of each. Keys come
again in every part of a download.{% if facts.copies.picture %} Pictures are counted as <code>ppldm dedup</code> found
them, resized or compressed ones among the copies.{% endif %}</p>

<h2>{{ count_of(pictures | length, "row") }} chosen at random</h2>
<div class="rows">
{% for url, width, factor, caption, place in pictures %}
<figure>
{% if url %}<img src="{{ url }}" width="{{ width }}"{% if factor > 1 %} class="large"{% endif %} alt="">{% endif %}
<figcaption><span class="caption{{ "" if url else " none" }}" dir="auto">{{ escape(caption) }}</span>
{{ escape(place) }}</figcaption></figure>
{% endfor %}
</div>
{% endblock %}
"""
