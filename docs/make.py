"""The hook of mkdocs.yml: what is made when the site is built, and is committed nowhere.

- Two whole pages: the settings (settings_table.py) and the API, read from docstrings.
- The READMEs, which are the site's quickstart in both languages.
- A line that ends in `<!-- made: NAME -->` becomes a table of `TABLES`: what was measured, from benchmarks/results,
  with its command and machine, and lists that the code holds (presets, devices, keys of other trainers).

So no figure, default or signature on the site can differ from its source.
"""

import ast
import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [path for path in (str(ROOT), str(DOCS)) if path not in sys.path]

from settings_table import settings_table  # noqa: E402


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


# What was measured: a function for each kind of file in benchmarks/results makes its table.


def shapes_world(results):
    """A row for each variant; chances are those of the first."""
    columns = {
        "shape": "seen.single.shape", "place": "seen.single.position", "everything": "seen.single.everything",
        "unseen": "held_out.single.everything", "several: everything": "seen.several.everything",
        "several, unseen": "held_out.several.everything", "relation": "seen.several.relation",
        "relation, unseen": "held_out.several.relation",
    }  # fmt: skip

    def cells(one):
        for name in columns.values():
            score = one["scores"][f"composition.{name}"]
            yield f"{percent(score['value'])} ({100 * score['low']:.0f} .. {100 * score['high']:.0f})"

    first = results["summary"][0]["scores"]
    chances = [percent(first[f"composition.{name}"]["chance"]) for name in columns.values()]
    rows = [(f"`{one['variant']}`", f"{one['cost']['cpu_seconds']:.0f}", *cells(one)) for one in results["summary"]]
    return table(("", "CPU seconds", *columns), [*rows, ("chance", "", *chances)])


def loader(results):
    return table(
        ("loader", "cores", "samples a second", "times the usual"),
        [
            (
                f"`{one['loader']}`",
                str(one["cores"]),
                f"{one['samples_per_second']:.0f}",
                f"{one['ratio_to_usual']:.1f}",
            )
            for one in results["loaders"]
        ],
    )


def train_step(results):
    return table(
        ("parameters", "ours, s", "bare, s", "added", "times faster by settings", "waits for data"),
        [
            (
                f"{one['parameters'] / 1e6:.1f} M",
                f"{one['overhead']['ours']['cpu']:.3f}",
                f"{one['overhead']['bare']['cpu']:.3f}",
                percent(one["overhead"]["share"], 1),
                f"{one['settings']['speedup']:.2f}",
                percent(one["data"]["share"], 2),
            )
            for one in results.values()
        ],
    )


def step_peers(results):
    names = {"quickstart": "quickstart's model, 48 px, one thread", "ldm-256": "small LDM, 256 px, two threads",
             "sd15": "Stable Diffusion 1.5's UNet, 256 px, no optimizer"}  # fmt: skip
    return table(
        ("step", "ppldm, s", "Paddle's own operators, s", "diffusers on PyTorch, s", "ppldm to PyTorch"),
        [
            (
                names[case],
                *(f"{one[side]['step']:.3f}" if side in one else "-" for side in ("ours", "plain", "pytorch")),
                f"{one['ours']['ratio']:.2f}",
            )
            for case, one in results.items()
        ],
    )


def latents(results):
    return table(
        ("pixels", "from pictures, ms", "from latents, ms", "times"),
        [
            (str(one["resolution"]), f"{one['pixels']:.2f}", f"{one['latents']:.3f}", f"{one['ratio']:.0f}")
            for one in results["rows"]
        ],
    )


def latents_step(results):
    row = (f"{results['pixels']['cpu']:.2f}", f"{results['latents']['cpu']:.2f}", f"{results['ratio']:.2f}")
    return table(("from pictures, CPU s", "from latents, CPU s", "times"), [row])


def patch_masking(results):
    return table(
        ("network", "all patches, ms", "a quarter, ms", "share"),
        [
            (f"`{name}`", f"{one['ms']:.0f}", f"{one['masked_ms']:.0f}", percent(one["share"]))
            for name, one in results["step"].items()
        ],
    )


def autoencoder(results):
    return table(
        ("loss", "seed", "PSNR", "SSIM", "CPU s"),
        [
            (f"`{name}`", str(one["seed"]), f"{one['psnr']:.1f}", f"{one['ssim']:.3f}", f"{one['cpu_seconds']:.0f}")
            for name, runs in results["runs"].items()
            for one in runs
        ],
    )


def buckets(results):
    rows = [(name, str(one["shapes"]), percent(one["cut"], 1)) for name, one in results["cut"].items()]
    return table(("`--buckets`", "shapes", "cut away"), rows)


def dedup(results):
    kinds = ("resized", "compressed", "cropped")
    return table(
        ("pictures", "bits", "precision", *kinds),
        [
            (
                one["world"],
                str(one["bits"]),
                f"{one['precision']:.3f}",
                *(f"{one['recall'][kind]:.2f}" for kind in kinds),
            )
            for one in results["quality"]
            if not one["mirrored"]
        ],
    )


def select_rows(results):
    row = (f"{results['rows']:,}", f"{results['seconds']}", f"{results['rows_per_second']:,}")
    head = ("rows", "seconds", "rows a second", "main process, MiB")
    return table(head, [(*row, str(results["peak_mib"]["main"]))])


def download(results):
    rows = [(f"`{one['name']}`", f"{one['rows_per_sec']:.0f}", f"{one['cpu_sec_per_1000']:.1f}") for one in results]
    return table(("program", "pictures a second", "CPU s per 1,000"), rows)


def stores(results):
    return table(
        ("", "pictures a second", "waits for data"),
        [
            (f"`{name}`", f"{results[name]['images_per_second']:.1f}", percent(results[name]["data_wait_share"], 2))
            for name in ("disk", "cold", "warm")
        ],
    )


def preset_needs(results):
    rows = [
        (
            f"`{name}`",
            f"{one['trained'] / 1e6:,.1f} M",
            str(one["pixels"]),
            ", ".join([f"{one['memory_gb']:.1f}", *one["not_counted"]]),
            str(one["devices"]),
            f"{one['operations_an_update'] / 1e12:,.3g}",
            "" if one["hours"] is None else f"{one['hours']:,.3g}",
        )
        for name, one in results.items()
    ]
    return table(("preset", "trained", "pixels", "GB", "devices", "TFLOP an update", "hours at 100 TFLOP/s"), rows)


def study(results):
    """Differences of logarithms as shares, ratios as they are; in bold what is told apart from the plain recipe."""

    def shown(found, form):
        if found is None:
            return ""
        value, low, high = (form(math.exp(found[key])) for key in ("value", "low", "high"))
        return f"**{value}** ({low} … {high})" if found["told_apart"] else f"{value} ({low} … {high})"

    rows = [
        (f"`{row['variant']}`", f"{row['rate']:g}", str(row["seeds"]), f"{row['loss']:.3f}",
         shown(row.get("difference"), lambda one: f"{100 * (one - 1):+.1f} %"),
         shown(row.get("samples"), "{:.2f}".format),
         shown(row.get("noisiest"), lambda one: f"{100 * (one - 1):+.1f} %"), f"{row['cost']:.2f}",
         *(f"{100 * row['scores'][f'{split}.colour']:.0f} %" for split in ("seen", "held_out")))
        for row in results["rows"]
    ]  # fmt: skip
    head = (
        "variant",
        "rate",
        "seeds",
        "loss",
        "difference",
        "samples to the plain loss",
        "at log-SNR -5",
        "CPU",
        "colour",
        "unseen",
    )
    itself = results["itself"]
    beside = f"The plain recipe beside itself: {itself['told_apart']} of {itself['comparisons']} told apart."
    return f"{table(head, rows)}\n\n{beside}"


MEASURED = {
    **{
        "recipes-shapes-world": shapes_world,
        "recipes-relations": shapes_world,
        "train_step-12": train_step,
        "step_peers-amd": step_peers,
        "step_peers-avx2": step_peers,
    },
    "presets": preset_needs,
    **{
        made.__name__: made
        for made in (loader, train_step, step_peers, latents, latents_step, patch_masking, autoencoder, buckets, dedup)
        + (select_rows, download, stores, study)
    },
}


def read_results(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def measured(name: str) -> str:
    """A file's figures with the command, the machine and the note of the file."""
    record = read_results(name)
    where = record["machine"]
    busy = ", busy" if where["busy"] else ""
    facts = [f"- Command: `{record['command']}`"]
    facts.append(f"- Machine: {where['processor']}, {where['cores']} cores{busy}, {record['date'][:10]}")
    facts += [f"- Note: {record['note']}"] * bool(record["note"])
    return MEASURED[name](record["results"]) + "\n\n" + "\n".join(facts)


# Lists that the code holds.


def presets() -> str:
    from ppldm.config.load import list_presets

    return table(("preset", "what it trains"), [(f"`{name}`", what) for name, what in list_presets().items()])


def foreign_keys(system: str) -> str:
    """Every key of a system's configs, what it is here, and what a reader should know; then what no key says."""
    from ppldm.config.foreign import SYSTEMS, UNSAID

    rows = [
        (f"`{key}`", ", ".join(f"`{one}`" for one in stated.keys) or "-", stated.note)
        for key, stated in SYSTEMS[system].items()
    ]
    rows += [("-", f"`{key}`", f"{value}, unless a key says otherwise") for key, value in UNSAID[system].items()]
    return table((system, "here", ""), rows)


def devices() -> str:
    from ppldm.utils.machine.devices import KINDS

    rows = []
    for kind in KINDS.values():
        settings = " ".join(f"`{key}={value}`" for key, value in kind.settings.items())
        package = f"`{kind.package}`" + (f" {kind.version} +" if kind.plugin else "")
        visible = ", ".join(f"`{key}`" for key in kind.visible)
        rows.append((f"`{kind.name}`", kind.words, visible, kind.collective, settings, package))
    return table(("`--device`", "what", "limited by", "ranks talk by", "set", "Paddle"), rows)


def certified() -> str:
    """Who has certified which device, from benchmarks/results/certified."""
    rows = []
    for path in sorted((ROOT / "benchmarks/results/certified").glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        of, versions, device = report["operations"], report["versions"], report["device"]
        worst = [max(one.get(key, float("inf")) for one in of) for key in ("forward", "gradient")]
        paddle = [f"{key} {version}" for key, version in versions.items() if re.match("paddle(?!nlp)", key)]
        rows.append(
            (
                *(f"{device['name']}: {device['model']}", report["by"], report["date"][:10]),
                f"ppldm {versions['ppldm']}, {', '.join(paddle)}",
                f"{sum(one['ok'] for one in of)} of {len(of)}",
                ", ".join(f"{one:.1e}" for one in worst),
                ", ".join(key for key, found in report["half_precision"].items() if found) or "none",
                "equal to the bit" if report["resume"]["equal"] else "not equal",
            )
        )
    head = ("device", "by", "when", "with", "operations", "worst: forward, gradient", "half precision", "resumed")
    return table(head, rows)


def reference(up: str) -> str:
    """Links to the pages that are there on the site only, from a page so far below docs/."""
    return f"[All settings]({up}settings.md) · [API]({up}api.md)"


class Method:
    """What the file of a method tells: by its docstring what it is, mathematics (indented), sources and published
    figure; its options. `named`: --methods takes it."""

    def __init__(self, path: Path):
        text = path.read_text(encoding="utf-8")
        told, folder = ast.get_docstring(ast.parse(text)) or "", path.parent.name
        self.named = folder == "methods" and "\nMETHOD = " in text
        self.of_training = self.named or folder != "methods" or path.with_suffix(".yaml").exists()
        self.name, self.what = f"`{path.stem}`", told.partition("\n")[0].rstrip(".")
        self.formula = "".join(f"`{one}`" for one in re.findall(r"^    (.+)$", told, re.M)[:1])
        self.sources = ", ".join(dict.fromkeys(re.findall(r"arXiv:[\d.]+\d|[\w.]+\.org/\S+", told)))
        sentence = r"[Pp]ublished: ((?:[^().;]|\([^()]*\)|[.;](?!\s|$))+)"
        self.published = "; ".join(re.findall(sentence, told.replace("\n", " ")))
        options = re.findall(r"^    (\w+): \w+ = (.+?)$", text, re.M)
        self.options = ", ".join(f"`{name}` {value}" for name, value in options)


def list_methods(*patterns: str) -> list[Method]:
    """Those whose paths in ppldm/methods are like one of these, by name."""
    paths = [path for one in patterns for path in (ROOT / "ppldm/methods").glob(one) if path.stem != "__init__"]
    return [Method(path) for path in sorted(paths, key=lambda path: path.stem)]


def methods() -> str:
    """What `--methods` takes."""
    found = [one for one in list_methods("*.py") if one.named]
    rows = [(one.name, one.what, one.options, one.sources, one.published) for one in found]
    return table(("method", "what it is", "options", "source", "published"), rows)


def methods_of_a_setting(*patterns: str) -> str:
    rows = [(one.name, one.what, one.formula, one.sources) for one in list_methods(*patterns)]
    return table(("value", "what it is", "mathematics", "source"), rows)


def labels() -> str:
    """Of each method of training whether the study tells it apart, and what is published."""
    study = read_results("study")["results"]["rows"]
    told = {f"`{one['variant']}`": one["difference"] for one in study if "difference" in one}
    proven = {name: "better" if one["value"] < 0 else "worse" for name, one in told.items() if one["told_apart"]}
    rows = []
    for one in list_methods("*.py", "*/*.py"):
        if one.of_training:
            label = "unproven" if re.search(r"\bfigure\b", one.published) else "published elsewhere"
            label = f"**proven here**, {proven[one.name]}" if one.name in proven else label
            rows.append((one.name, label, ": ".join(filter(None, (one.sources, one.published)))))
    return table(("value", "label", "what is published"), rows)


TABLES: dict[str, Callable[[], str]] = {
    **{"reference": lambda: reference(""), "zh/reference": lambda: reference("../")},
    **{"methods": methods, "methods/labels": labels, "presets": presets, "devices": devices, "certified": certified},
    "methods/targets": lambda: methods_of_a_setting("targets/*.py"),
    "methods/levels": lambda: methods_of_a_setting("levels/*.py", "stratified.py"),
    "methods/weights": lambda: methods_of_a_setting("weights/*.py"),
    "methods/averages": lambda: methods_of_a_setting("averages/*.py"),
    "methods/offsets": lambda: methods_of_a_setting("offsets/*.py"),
    **{name: lambda name=name: foreign_keys(name) for name in ("open-diffusion", "Stable Cascade")},
    **{f"results/{name}": lambda name=name: measured(name) for name in MEASURED},
}

# Whole pages.

# Whose public names make the page of the API: what a script of one's own would import.
MODULES = (
    *("ppldm", "ppldm.inference.load", "ppldm.inference.pipeline", "ppldm.diffusion.drawing", "ppldm.config.load"),
    *("ppldm.config.recipe", "ppldm.data.filelist"),
    *("ppldm.data.formats.open", "ppldm.data.cached.file", "ppldm.families.base", "ppldm.networks.model"),
    *("ppldm.diffusion.process", "ppldm.diffusion.samplers", "ppldm.utils.rng"),
    "ppldm.utils.errors",
)


def api_page() -> str:
    """The public functions and classes of `MODULES`, with signatures and docstrings, read without importing them."""
    parts = [
        "# API",
        "What a script of your own may import. Most people need only `ppldm.load` ([weights.md](weights.md)); "
        "[extending.md](extending.md) says how to add a family or a format. Whatever is not listed may change without "
        "notice.",
    ]
    for module in MODULES:
        path = ROOT / (module.replace(".", "/") + ".py")
        tree = ast.parse((path if path.exists() else path.with_suffix("") / "__init__.py").read_text(encoding="utf-8"))
        parts.append(f"## {module}")
        parts += _docstring(tree)
        for node in tree.body:
            parts += _described(node, "")
    return "\n\n".join(parts) + "\n"


def _described(node: ast.stmt, prefix: str) -> list[str]:
    """A public function, or a class with its public methods; of anything else nothing."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return []
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        inner = [text for child in node.body for text in _described(child, f"{node.name}.")]
        return [f"### class `{node.name}{f'({bases})' if bases else ''}`", *_docstring(node), *inner]
    if prefix and not ast.get_docstring(node):
        return []
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    is_property = any(ast.unparse(mark).endswith("property") for mark in node.decorator_list)
    arguments = "" if is_property else f"({re.sub(r'^self(, )?', '', ast.unparse(node.args))})"
    return [f"{'####' if prefix else '###'} `{prefix}{node.name}{arguments}{returned}`", *_docstring(node)]


def _docstring(node) -> list[str]:
    text = ast.get_docstring(node)
    return [inspect.cleandoc(text).replace("<", "&lt;")] if text else []


def settings_page() -> str:
    from ppldm.families.base import get_family, list_families

    return settings_table({name: get_family(name).Config for name in list_families()})


READMES = {"quickstart.md": ("README.md", ""), "zh/quickstart.md": ("README_cn.md", "../")}


def readme_page(page: str) -> str:
    """A README as a page of the site: its links to pages lead there, and files that are no pages are not linked."""
    readme, up = READMES[page]
    text = (ROOT / readme).read_text(encoding="utf-8")
    text = re.sub(r"\[([^]]+)\]\((?!docs/|README|http|#)[^)]*\)", r"`\1`", text)
    text = text.replace("](README.md)", "](../quickstart.md)").replace("](README_cn.md)", "](zh/quickstart.md)")
    return text.replace("](docs/", f"]({up}")


PAGES: dict[str, Callable[[], str]] = {
    **{"api.md": api_page, "settings.md": settings_page},
    **{page: lambda page=page: readme_page(page) for page in READMES},
}


def with_tables(text: str) -> str:
    """A page's text with its made tables. Raises KeyError for a name that `TABLES` has not."""
    return re.sub(r"^(?:.* )?<!-- made: (.+) -->$", lambda found: TABLES[found[1]](), text, flags=re.MULTILINE)


# Hooks of mkdocs.


def on_files(files, config):
    from mkdocs.structure.files import File

    for page, make in PAGES.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown, **_):
    return with_tables(re.sub(r"\]\((?:\.\./)+README(?:_cn)?\.md", "](quickstart.md", markdown))
