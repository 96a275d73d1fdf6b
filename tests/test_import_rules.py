"""Who may import whom (docs/architecture.md), read from the source: nothing is imported here."""

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ppldm"

FINDING = ("methods.load", "methods.names")  # of a method that a setting names

# Of each area: what of ppldm it may import besides itself. An area is a folder, or a module named in full.
ALLOWED = {
    "utils": set(),
    "config": {"utils"},
    "data": {"methods.stratified", "config", "utils"},
    "diffusion": {*FINDING, "methods.cfg_zero", "methods.guidance_interval", "config", "utils"},
    "networks": {"diffusion", "config", "utils"},
    "weights": {"families.base", "networks", "diffusion", "config", "utils"},
    "methods": {"weights.components", "weights.losses", "networks", "diffusion", "data", "config", "utils"},
    "families": {"methods", "networks", "weights", "diffusion", "data", "config", "utils"},
    "cache": {"families.settings", "networks", "weights", "data", "config", "utils"},
    "inference": {"families", "cache", "methods", "networks", "weights", "diffusion", "data", "config", "utils"},
    "prepare": {"runs.past", "data", "config", "utils"},
    "inspect": {"training.metrics", "prepare", "data", "config", "utils"},
    "demo": {"families.first_training", "weights.folders", "prepare", "data", "config", "utils"},
    "training": {
        *("inference", "families", "cache", "methods", "networks", "weights", "diffusion", "data", "config", "utils"),
    },
    "evaluation": {
        *("training", "inference", "families", "networks", "weights", "diffusion", "data", "demo", "config", "utils"),
        "methods.autoguidance",
    },
    "runs": {"evaluation", "training", "inference", "families", "weights", "diffusion", "data", "config", "utils"},
    "cli": {"config", "utils"},
}

# Spark executors and the command line have no time, or no room, for these.
HEAVY = {"paddle", "paddlenlp", "ppdiffusers"}
LIGHT_AREAS = {"cache", "cli", "config", "data", "demo", "inspect", "prepare", "utils"}
NOT_LIGHT = {"cache.encoders", "data.loader"}
LIGHT_MODULES = {
    "__init__",
    "__main__",
    "networks.configs",
    "networks.config_fields",
    "networks.engine",
    "weights.folders",
    "weights.fetch",
    "weights.model_file",
    "training.commands.train",
    "runs.past",
    "training.checkpoint",
    "training.metrics",
    "training.rows",
    "training.run_folder",
    "families.base",
    "families.ldm",
    "families.controlnet",
    "families.autoencoder",
    "data.inputs",
}

MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}

parse = cache(ast.parse)  # the same sources are read by several laws


@cache
def imports(source: str, name: str, module_level: bool = False) -> set[str]:
    """The full names of all modules that the source of ppldm module `name` imports, relative ones resolved."""
    found = set()
    nodes = list(_at_import_time(parse(source))) if module_level else list(ast.walk(parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["ppldm", *name.split(".")][: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def _at_import_time(node):
    for child in ast.iter_child_nodes(node):
        is_of_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not is_of_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _at_import_time(child)


def breaches(source: str, name: str) -> list[str]:
    """The imports of ppldm in a module that its area does not allow."""
    area = name.split(".")[0]
    if area not in ALLOWED:
        return []
    inside = [full.removeprefix("ppldm.") for full in imports(source, name) if full.startswith("ppldm.")]
    inside = [full for full in inside if full != "__version__"]
    allowed = ALLOWED[area] | {area}
    return [full for full in inside if not any(full == one or full.startswith(f"{one}.") for one in allowed)]


def test_areas_import_only_what_they_may():
    assert not [name for name in MODULES if "." in name and name.split(".")[0] not in ALLOWED], "an area without a rule"
    found = {name: breaches(path.read_text(encoding="utf-8"), name) for name, path in MODULES.items()}
    assert not {name: imported for name, imported in found.items() if imported}


def test_light_modules_load_nothing_heavy():
    light = [name for name in MODULES if name.split(".")[0] in LIGHT_AREAS and name not in NOT_LIGHT]
    offenders = {}
    for name in {*light, *LIGHT_MODULES}:
        found = imports(MODULES[name].read_text(encoding="utf-8"), name, module_level=True)
        if heavy := {full for full in found if full.split(".")[0] in HEAVY}:
            offenders[name] = heavy
    assert not offenders


def test_the_light_modules_exist():
    assert set(MODULES) >= LIGHT_MODULES | NOT_LIGHT


@pytest.mark.parametrize(
    "source, name, found",
    [
        ("from ..training import loop", "families.build", ["training.loop"]),
        ("from ppldm.training.run import X", "prepare.convert", ["training.run.X"]),
        ("import ppldm.families.ldm", "data.shapes", ["families.ldm"]),
        ("def f():\n    from ..families import ldm", "data.shapes", ["families.ldm"]),
        ("from ...data.formats.part import Part", "prepare.convert.convert", []),
        ("from . import row", "data.formats.part", []),
        ("from ..database.party import x", "prepare.convert", ["database.party.x"]),
    ],
)
def test_a_breach_is_found(source, name, found):
    assert breaches(source, name) == found


def test_a_heavy_import_is_found_at_module_level_only():
    assert imports("try:\n    import paddle.io\nexcept E: pass", "x", module_level=True) == {"paddle.io"}
    assert imports("def f():\n    import paddle", "x", module_level=True) == set()


def graph(modules: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of ppldm that its source imports, inside of functions too."""
    found = {}
    for name, source in modules.items():
        full = {one.removeprefix("ppldm.") for one in imports(source, name) if one.startswith("ppldm.")}
        found[name] = {one if one in modules else one.rpartition(".")[0] for one in full} & modules.keys()
    return found


def find_circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, the last one the first; empty where there are none."""
    done, path = set(), []

    def visit(name: str) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        path.append(name)
        for other in sorted(edges[name] - {name}):
            if circle := visit(other):
                return circle
        done.add(path.pop())
        return []

    return next((circle for name in sorted(edges) if (circle := visit(name))), [])


def test_no_module_imports_itself_by_way_of_others():
    edges = graph({name: path.read_text(encoding="utf-8") for name, path in MODULES.items()})
    assert not find_circle(edges)


def test_a_circle_is_found():
    modules = {
        "utils.a": "from .b import x",
        "utils.b": "def f():\n    from ..data import c",
        "data.c": "from ppldm.utils.a import y",
        "data.d": "from . import c",
    }
    assert find_circle(graph(modules)) == ["data.c", "utils.a", "utils.b"]
    assert find_circle(graph(modules | {"data.c": "from ppldm.utils import z"})) == []


def stated_names(source: str) -> set[str]:
    """All names that a source binds, wherever it does."""
    found = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return found


def missing_names(modules: dict[str, str]) -> list[str]:
    """What sources import of ppldm, inside functions too, that its module does not state."""
    stated = {name.removesuffix(".__init__"): stated_names(source) for name, source in modules.items()}
    stated[""] = stated.pop("__init__", set())
    missing = []
    for name, source in modules.items():
        inside = {one.removeprefix("ppldm.") for one in imports(source, name) if one.startswith("ppldm.")}
        parts = {full: full.rpartition(".") for full in inside if full not in stated}
        missing += [f"{name}: {full}" for full, (module, _, one) in parts.items() if one not in stated.get(module, ())]
    return missing


def test_what_is_imported_is_there():
    """mypy does not look: names that are taken inside functions would fail when a user gets there."""
    assert not missing_names({name: path.read_text(encoding="utf-8") for name, path in MODULES.items()})


def test_a_missing_name_is_found():
    modules = {"utils.a": "x = 1", "utils.b": "def f():\n    from .a import y\nfrom . import a\nfrom .a import x"}
    assert missing_names(modules) == ["utils.b: utils.a.y"]
    assert missing_names({"utils.b": "from ..data.gone import x"}) == ["utils.b: data.gone.x"]


def test_one_module_looks_at_environment_variables():
    words = ("os.environ", "os.getenv", "os.putenv", "import environ", "import getenv")
    found = [name for name, path in MODULES.items() if any(word in path.read_text("utf-8") for word in words)]
    assert found == ["utils.variables"]


def test_paddlenlps_trainer_is_known_in_one_place():
    """Its successor can be adopted there: the loop around a run, and what becomes of its flags."""
    knowing = {
        name
        for name, path in MODULES.items()
        if any(full.startswith("paddlenlp.trainer") for full in imports(path.read_text(encoding="utf-8"), name))
    }
    assert knowing == {"training.trainer"}
