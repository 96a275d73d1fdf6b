"""Who may import whom (docs/architecture.md), read from the source: nothing is imported here."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ppldm"

# Of each area: what of ppldm it may import besides itself. An area is a folder, or a module named in full.
ALLOWED = {
    "utils": set(),
    "config": {"utils"},
    "data": {"config", "utils"},
    "diffusion": {"config", "utils"},
    "networks": {"config", "utils"},
    "weights": {"networks", "diffusion", "config", "utils"},
    "families": {"networks", "weights", "diffusion", "data", "config", "utils"},
    "inference": {"families", "networks", "weights", "diffusion", "data", "config", "utils"},
    "prepare": {"data", "config", "utils"},
    "inspect": {"data", "config", "utils"},
    "demo": {"prepare", "data", "config", "utils"},
    "training": {"inference", "families", "networks", "weights", "diffusion", "data", "config", "utils"},
    "cli": {"config", "utils"},
}

# Spark executors and the command line have no time, or no room, for these.
HEAVY = {"paddle", "paddlenlp", "ppdiffusers"}
LIGHT_AREAS = {"cli", "config", "data", "demo", "inspect", "prepare", "utils"}
NOT_LIGHT = {"data.loader", "data.shared_memory"}
LIGHT_MODULES = {
    "__init__",
    "__main__",
    "networks.configs",
    "networks.config_fields",
    "weights.fetch",
    "weights.model_file",
    "training.early",
    "training.network_flags",
}

MODULES = {
    "__init__",
    "__main__",
    "cli",
    "data.__init__",
    "data.row",
    "data.sample",
    "data.index",
    "data.stored",
    "data.indexed",
    "data.container",
    "data.layouts",
    "data.selection",
    "data.expression",
    "data.judge",
    "data.columns",
    "data.sidecar",
    "data.fingerprint",
    "data.watched",
    "data.where",
    "data.tar_shard",
    "data.parquet_table",
    "data.image_folder",
    "data.csv_table",
    "data.image",
    "data.part",
    "data.filelist",
    "data.order",
    "data.sampler",
    "data.transforms",
    "data.handlers",
    "data.tokenizer",
    "data.clip_tokenizer",
    "data.coverage",
    "data.vocabulary",
    "models.weights.fetch",
    "training.early",
    "data.dataset",
    "models.model_file",
    "models.network_configs",
    "models.network_settings",
    "training.network_flags",
}

MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(source: str, name: str, module_level: bool = False) -> set[str]:
    """The full names of all modules that the source of ppldm module `name` imports, relative ones resolved."""
    found = set()
    nodes = list(_at_import_time(ast.parse(source))) if module_level else list(ast.walk(ast.parse(source)))
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
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
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


@pytest.mark.parametrize("name", MODULES)
def test_areas_import_only_what_they_may(name):
    assert name.split(".")[0] in ALLOWED or "." not in name, f"ppldm/{name} is in an area without a rule"
    assert not breaches(MODULES[name].read_text(encoding="utf-8"), name)


@pytest.mark.parametrize(
    "name",
    [name for name in MODULES if name in LIGHT_MODULES or name.split(".")[0] in LIGHT_AREAS and name not in NOT_LIGHT],
)
def test_light_modules_load_nothing_heavy(name):
    found = imports(MODULES[name].read_text(encoding="utf-8"), name, module_level=True)
    assert not {full for full in found if full.split(".")[0] in HEAVY}


def test_the_light_modules_exist():
    assert set(MODULES) >= LIGHT_MODULES | NOT_LIGHT


@pytest.mark.parametrize(
    "source, name, found",
    [
        ("from ..training import loop", "families.build", ["training.loop"]),
        ("from ppldm.training.run import X", "prepare.convert", ["training.run.X"]),
        ("import ppldm.families.ldm", "data.order", ["families.ldm"]),
        ("def f():\n    from ..families import ldm", "data.order", ["families.ldm"]),
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
