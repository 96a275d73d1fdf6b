"""A small schema of settings, and reading a file by it."""

from ppldm.config.load import file_layers, flag_layer, load, override_layer
from ppldm.config.option import REQUIRED, Bounds, Option


def stated(name: str, section: str = "", **facts) -> Option:
    default = facts.pop("default", None)
    return Option(help="", default=default, loop_default=default, name=name, section=section, **facts)


SCHEMA = {
    "family": stated("family", default="ldm"),
    "data.list": stated("list", "data", default=REQUIRED),
    "data.size": stated("size", "data", type=int, default=256, bounds=Bounds(above=0)),
    "data.kind": stated("kind", "data", default="lanczos", choices=("lanczos", "area")),
    "run.rate": stated("rate", "run", type=float, default=1e-4, also=("lr",)),
    "run.names": stated("names", "run", is_list=True, default=["visualdl"]),
    "run.where": stated("where", "run", may_be_none=True),
    "run.flip": stated("flip", "run", type=bool, default=False),
}


def read(path, *overrides, **flags) -> dict:
    layers = file_layers(path)
    layers += [override_layer(list(overrides), SCHEMA), flag_layer(flags, SCHEMA)]
    return load(layers, SCHEMA, {key: one.default_of(loop=False) for key, one in SCHEMA.items()})
