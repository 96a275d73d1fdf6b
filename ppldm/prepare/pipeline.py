"""`ppldm pipeline`: filter, download, annotate and convert by one file of settings.

Laws. The stage's own command decides what is finished (`ppldm.utils.finished`); it is not even asked where nobody has
touched the files that it read and wrote. Other settings make filter and convert again; what was downloaded is refused,
unless `--redo`. All settings are checked before the first stage begins. Rows in = rows out + rows dropped, by reason,
at every stage, and each stage takes in what the one before gave out.

    OUT/metadata/     part_1.parquet, ... of the filter; missing where the settings have no `filter`
    OUT/images/       part_1/, ... of the download; part_1.csv of annotate
    OUT/data/         part files and filelists
    OUT/report.json   rows, bytes and seconds of every stage, measured, and projected for the whole data set
    OUT/.pipeline/    seconds and results of stages; may be deleted, the commands then look for themselves

In the file (docs/laion.md) every setting of a stage is a flag of its command. Relative paths are taken from its folder.
"""

import inspect
import io
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, get_args, get_origin

from ..config.load import Layer, file_layers, load, override_layer
from ..config.option import REQUIRED, Bounds, Option
from ..utils.errors import ConfigError, DataError
from ..utils.files import local_path, lock_folder, make_output_dir, read_json, write_json
from ..utils.finished import list_pieces, take_state
from ..utils.log import get_logger
from ..utils.text import hide, hide_all, print_report
from .convert.units import NOT_DOWNLOADED
from .download.failures import merge_reports
from .metadata import read_tables
from .place import natural_key

# Stage -> the module of its command, in the order in which they run.
STAGES = {
    "filter": ".filter.filter",
    "download": ".download.download",
    "annotate": ".convert.annotate",
    "convert": ".convert.convert",
}
_ALWAYS = ("download", "convert")
# Arguments that the pipeline gives itself, or that make a command do something else.
_OWN = {"input", "output", "metadata", "out", "folder", "json", "dry_run", "check", "redo", "retry_failed", "only"}


def pipeline(
    config: str,  # YAML file: out, metadata, and the flags of filter, download, annotate and convert; see the docs
    overrides: Annotated[list, {"opt": False, "nargs": "*", "type": str}] = (),  # key=value in place of the file's
    redo: bool = False,  # also download again what was downloaded for other metadata or with other settings
    dry_run: bool = False,  # check everything, print the commands of the stages that would run, and write nothing
    json: bool = False,  # print the report as JSON instead of a table
):
    """Make training data from LAION metadata: all stages, by one YAML file, each skipped where it is done."""
    settings = read_config(config, overrides)
    stages = make_stages(settings, redo)
    check_stages(stages)
    if dry_run:
        sys.stdout.write("\n".join(describe_plan(stages)) + "\n")
        return
    make_output_dir(settings.out)
    with lock_folder(settings.out):
        results = {stage.name: stage.finish() for stage in stages}
        check_accounts(results, settings)
        report = make_report(results, settings)
        write_json(settings.out / "report.json", report | {"file_list": hide(report["file_list"])})
    print_report(report, describe, json)


@dataclass(frozen=True)
class StageResult:
    """What became of a stage's rows. `seconds` are those of all runs that it took."""

    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    bytes: int
    seconds: float = 0.0


@dataclass(frozen=True)
class PipelineConfig:
    """Absolute paths; of each stage that is to run, its arguments by name."""

    out: Path
    metadata: tuple[Path, ...]
    whole_rows: int | None
    stages: dict[str, dict]


@dataclass(frozen=True)
class Stage:
    """One stage: the command's function by its name, all its arguments, the files it reads, where its result lies.
    `redo`: whether other settings make again what is there. CSV files in the folder of pictures are only annotate's."""

    name: str
    arguments: dict
    inputs: tuple[Path, ...]
    output: Path
    record: Path
    redo: bool = False

    @property
    def recorded(self) -> dict:
        """The arguments as a record has them."""
        return {name: hide_all(value) for name, value in self.arguments.items()}

    def input_state(self) -> str:
        return _state(self.inputs, with_csv=False)

    def output_state(self) -> str:
        return _state([self.output], with_csv=self.name == "annotate")

    def finished(self) -> StageResult | None:
        """The result of an earlier run with these settings, where nobody has touched its input or output since."""
        record = read_json(self.record) or {}
        if record.get("arguments") != self.recorded or "input" not in record or not self.output.exists():
            return None
        is_same = (record["input"], record["output"]) == (self.input_state(), self.output_state())
        return StageResult(**record["result"]) if is_same else None

    def finish(self) -> StageResult:
        """Run the stage unless it is finished. Raises PpldmError; the time is kept."""
        if result := self.finished():
            get_logger().info("%s: finished before", self.name)
            return result
        get_logger().info("%s: %s", self.name, self.describe())
        record, started, input_state = read_json(self.record) or {}, time.monotonic(), self.input_state()
        earlier = record["seconds"] if record.get("arguments") == self.recorded else 0.0
        try:
            with redirect_stdout(sys.stderr):
                returned = load_stage(self.name)(**self.all_arguments)
        finally:
            seconds = round(earlier + time.monotonic() - started, 3)
            make_output_dir(self.record.parent)
            record = {"arguments": self.recorded, "seconds": seconds}
            write_json(self.record, record)
        result = replace(self._result(returned), seconds=seconds)
        states = {"input": input_state, "output": self.output_state()}
        write_json(self.record, record | {"result": asdict(result)} | states)
        return result

    def _result(self, returned) -> StageResult:
        """By the records that the command has left, and of annotate, which leaves none, by what it has returned."""
        if self.name == "annotate":
            skipped = dict(sum((Counter(counts["skipped"]) for counts in returned.values()), Counter()))
            num_lines = sum(counts["lines"] for counts in returned.values())
            num_bytes = sum(Path(path).stat().st_size for path in returned)
            return StageResult(num_lines + sum(skipped.values()), num_lines, skipped, num_bytes)
        there = _READERS[self.name](self.output)
        if self.name == "download":  # of the parts downloaded now, or of all that earlier runs have, too
            own = of_download(returned)
            return there if there and there.rows_in > own.rows_in else own
        return there

    @property
    def all_arguments(self) -> dict:
        return self.arguments | ({"redo": True} if self.redo and self.output.exists() else {})

    def describe(self) -> str:
        """The stage as a command line that can be pasted."""
        return shlex.join(command_words(self.name, self.all_arguments))

    def check(self, stand_in: Path | None = None) -> None:
        """Find what its command would refuse. `stand_in`: an empty table where `metadata` is not made yet."""
        changes = {} if stand_in is None else {"metadata": str(stand_in), "out": str(stand_in / "out")}
        if self.name == "convert":
            from .convert.convert import check_conversion

            check_conversion(**self.all_arguments)
        elif self.name != "annotate":  # which takes any value
            with redirect_stdout(io.StringIO()):
                load_stage(self.name)(**self.all_arguments | changes, dry_run=True)


def load_stage(name: str):
    """The function behind the command `ppldm name`."""
    return getattr(import_module(STAGES[name], __package__), name)


def read_config(path, overrides: list[str] = ()) -> PipelineConfig:
    """Read and check the file. Raises ConfigError with the line, the key, the value and what could be there."""
    schema = _schema()
    layers = [_as_written(layer) for layer in [*file_layers(path), override_layer(overrides, schema)]]
    found = load(layers, schema, {key: stated.default for key, stated in schema.items()})
    settings = {key: one.value for key, one in found.items() if one.origin != "default"}
    metadata = settings["metadata"]
    given = {key.partition(".")[0] for layer in layers for key in layer.values}
    if not metadata:
        raise ConfigError(f"{path}: metadata names nothing; name parquet files, or folders of them")
    if len(metadata) > 1 and "filter" not in given:
        raise ConfigError(f"{path}: several `metadata` need a `filter` to make them one; `filter: {{}}` keeps all rows")
    folder = Path(path).parent
    resolved = tuple((folder / local_path(one)).absolute() for one in metadata)
    if missing := [str(one) for one in resolved if not one.exists()]:
        raise ConfigError(f"{path}: `metadata` {missing[0]} does not exist")
    stages = {
        stage: {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{stage}.")}
        for stage in STAGES
        if stage in given or stage in _ALWAYS
    }
    out = (folder / local_path(settings["out"])).absolute()
    return PipelineConfig(out, resolved, settings.get("whole_rows"), stages)


def _schema() -> dict[str, Option]:
    """The options of the file by key: its own, and the flags of each stage."""
    found = {
        "out": _stated("out", str, REQUIRED),
        "metadata": _stated("metadata", str, REQUIRED, is_list=True),
        "whole_rows": _stated("whole_rows", int, None, bounds=Bounds(least=1)),
    }
    for stage in STAGES:
        for name, parameter in inspect.signature(load_stage(stage)).parameters.items():
            if name not in _OWN:
                kind, facts = _kind_of(parameter)
                stated = {"choices": tuple(facts.get("choices", ())), "is_list": facts.get("nargs") == "+"}
                found[f"{stage}.{name}"] = _stated(name, kind, parameter.default, section=stage, **stated)
    return found


def _kind_of(parameter: inspect.Parameter) -> tuple[type, dict]:
    """Of a command: its type, and what else the command line knows of it."""
    kind = parameter.annotation
    return get_args(kind) if get_origin(kind) is Annotated else (kind, {})


def _stated(name: str, kind: type, default, **facts) -> Option:
    return Option("", default, default, name=name, type=kind, may_be_none=default is None, **facts)


def _as_written(layer: Layer) -> Layer:
    """A layer with hyphens as underscores, one metadata as a list of it, and `stage: true` as a stage without flags."""
    values = {key.replace("-", "_"): value for key, value in layer.values.items()}
    values |= {stage: None for stage in STAGES if values.get(stage) is True}
    if isinstance(metadata := values.get("metadata"), str) and metadata != "???":
        values["metadata"] = [metadata]
    return replace(layer, values=values, lines={key.replace("-", "_"): line for key, line in layer.lines.items()})


def command_words(stage: str, arguments: dict) -> list[str]:
    """The command line of a stage as words, which `shlex.join` makes one that can be pasted."""
    parameters = inspect.signature(load_stage(stage)).parameters
    places, flags = [], []
    for name, value in arguments.items():
        values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        flag, default = f"--{name.replace('_', '-')}", parameters[name].default
        if default is inspect.Parameter.empty and not _kind_of(parameters[name])[1].get("opt"):
            places += values
        elif isinstance(value, bool):
            flags += [] if value == default else [flag if value else f"--no-{flag[2:]}"]
        elif len(values) == 1:
            flags.append(f"{flag}={values[0]}" if values[0].startswith("-") or not values[0] else flag)
            flags += [] if "=" in flags[-1] else values
        else:
            flags += [flag, *values]
    return ["ppldm", stage, *places, *flags]


def make_stages(settings: PipelineConfig, redo: bool = False) -> list[Stage]:
    """The stages in their order, each reading what the one before writes."""
    out, given = settings.out, settings.metadata
    metadata, images, data = out / "metadata", out / "images", out / "data"
    source = (metadata,) if "filter" in settings.stages else given
    stages = {
        "filter": ({"input": [*map(str, given)], "output": str(metadata)}, given, metadata, True),
        "download": ({"metadata": str(source[0]), "out": str(images)}, source, images, redo),
        "annotate": ({"folder": str(images)}, (images,), images, False),
        "convert": ({"folder": str(images), "out": str(data)}, (images,), data, True),
    }
    return [
        Stage(name, own | settings.stages[name], inputs, output, out / ".pipeline" / f"{name}.json", again)
        for name, (own, inputs, output, again) in stages.items()
        if name in settings.stages
    ]


def check_stages(stages: list[Stage]) -> None:
    """Find what any stage would refuse before the first begins. Raises PpldmError."""
    import pyarrow.parquet as pq

    from .filter.filter import plan_filter

    with tempfile.TemporaryDirectory() as folder:
        is_made = stages[0].name != "filter" or bool(stages[0].finished())
        if not is_made:  # empty tables of the columns and names that the filter will write
            plan = plan_filter(**stages[0].arguments)
            names = plan.tables.columns.published_names()
            schema = pq.read_schema(plan.tables.paths[0])
            empty = schema.empty_table().rename_columns([names[name] for name in schema.names])
            for number in range(plan.num_parts):
                pq.write_table(empty, Path(folder, f"part_{number + 1}.parquet"))
        for stage in stages:
            stage.check(Path(folder) if stage.name == "download" and not is_made else None)


def check_accounts(results: dict[str, StageResult], settings: PipelineConfig) -> None:
    """Raises DataError where a row is lost inside a stage or between two."""
    for name, result in results.items():
        if result.rows_in != result.rows_out + sum(result.dropped.values()):
            raise DataError(f"{name} lost rows: {result}; run the same command again, and tell us where it stays so")
    whole = not settings.stages["download"].get("part_id", 0)
    pairs = [("filter", "download")] * whole + [("download", "annotate"), ("download", "convert")]
    for before, after in [pair for pair in pairs if results.keys() >= {*pair}]:
        given, taken = results[before].rows_out, results[after].rows_in
        if given != taken:
            raise DataError(
                f"{before} gave {given:,} rows and {after} took {taken:,}: files "
                f"of {settings.out} were changed by hand; run the same command again, or delete that stage's folder"
            )
    if not results["download"].rows_out:
        raise DataError("no picture could be downloaded; `ppldm download` says why, by class of failure")


def make_report(results: dict[str, StageResult], settings: PipelineConfig) -> dict:
    """The results, and what they say of a data set of `whole_rows` rows: rows out, bytes and seconds in proportion."""
    first = next(iter(results.values()))
    given = list(map(str, settings.metadata))
    whole_rows = settings.whole_rows or (first.rows_in if "filter" in results else read_tables(given).rows)
    rows_in, projected = whole_rows, {}
    for name, result in results.items():
        factor = rows_in / max(result.rows_in, 1)
        projected[name] = {
            "rows_in": round(rows_in),
            "rows_out": round(result.rows_out * factor),
            "bytes": round(result.bytes * factor),
            "seconds": round(result.seconds * factor, 1),
        }
        if name != "annotate":  # which gives nothing to the next
            rows_in = result.rows_out * factor
    stages = {name: asdict(result) for name, result in results.items()}
    file_list = f"{settings.out / 'data' / settings.stages['convert'].get('name', 'custom')}.filelist.list"
    return {"stages": stages, "whole_rows": whole_rows, "projected": projected, "file_list": file_list}


def describe(report: dict) -> str:
    lines = [f"{'stage':<10}{'rows in':>15}{'rows out':>15}{'size':>12}{'time':>10}"]
    for name, stage in report["stages"].items():
        lines.append(_line(name, stage))
        lines += [f"    {reason}: {count:,}" for reason, count in stage["dropped"].items()]
    lines.append(f"projected for {report['whole_rows']:,} rows of metadata, on this machine:")
    lines += [_line(name, stage) for name, stage in report["projected"].items()]
    return "\n".join([*lines, f"for ppldm train: --file_list {report['file_list']}"])


def describe_plan(stages: list[Stage]) -> list[str]:
    """The command of each stage, in words of the shell. After one that is to run, all that read its output are."""
    lines, to_do = [], False
    for stage in stages:
        to_do = to_do or stage.finished() is None
        lines.append(stage.describe() if to_do else f"# {stage.name}: finished before")
    return [*lines, "# nothing was written"]


def _state(paths: Iterable[Path], with_csv: bool) -> str:
    """That of files that a stage reads or writes: CSV files, or all others."""
    pieces = (piece for path in paths for piece in list_pieces(path))
    return take_state(piece for piece in pieces if piece.name.endswith(".csv") == with_csv)


def _line(name: str, stage: dict) -> str:
    rows, seconds = f"{stage['rows_in']:>15,}{stage['rows_out']:>15,}", stage["seconds"]
    taken = f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
    taken = f"{seconds:.1f} s" if seconds < 120 else taken
    return f"{name:<10}{rows}{_format_bytes(stage['bytes']):>12}{taken:>10}"


def _format_bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"


def _read_manifest(folder: Path, names: str) -> dict | None:
    """That of a stage that is finished, which `names` this; None where the folder holds no such thing."""
    manifest = read_json(folder / "manifest.json")
    return manifest if isinstance(manifest, dict) and manifest.keys() >= {"rows_out", names} else None


def read_filter(folder: Path) -> StageResult | None:
    """Of what `ppldm filter` has finished; None where the folder holds no such thing."""
    if not (manifest := _read_manifest(folder, "conditions")):
        return None
    dropped = {entry["condition"]: entry["rows"] for entry in manifest["dropped"]}
    return StageResult(manifest["rows_in"], manifest["rows_out"], dropped, _sum_bytes(manifest))


def of_download(report: dict) -> StageResult:
    """Of an account of `ppldm download` that has come to its end."""
    return StageResult(report["rows"], report["success"], report["failed"], report["bytes"])


def read_download(folder: Path) -> StageResult | None:
    """Of the parts in a folder that `ppldm download` has ended. What it could not even try is dropped so far."""
    reports = [read_json(path) for path in sorted(folder.glob("part_*/.download/report.json"), key=natural_key)]
    reports = [report for report in reports if report]
    if not reports:
        return None
    whole = merge_reports(reports)
    pending = {"not tried yet": whole["pending"]} if whole["pending"] else {}
    return of_download(whole | {"failed": whole["failed"] | pending})


def read_convert(folder: Path) -> StageResult | None:
    """Of what `ppldm convert` or `ppldm repack` has finished. Rows without a picture are the download's."""
    if not (manifest := _read_manifest(folder, "skipped")):
        return None
    skipped = {reason: count for reason, count in manifest["skipped"].items() if reason != NOT_DOWNLOADED}
    rows_in = manifest["rows_in"] - manifest["skipped"].get(NOT_DOWNLOADED, 0)
    return StageResult(rows_in, manifest["rows_out"], skipped, _sum_bytes(manifest))


def read_stages(folders: Iterable[Path]) -> list[tuple[str, Path, StageResult]]:
    """(name, folder, result) of every stage that left records in these folders, the earlier stages first. Of a
    conversion the folders that it was made from are looked into as well; of a pipeline all its folders."""
    places = [*dict.fromkeys(_with_sources(folders))]
    found = ((name, folder, read(folder)) for name, read in _READERS.items() for folder in places)
    return [one for one in found if one[2]]


def _with_sources(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in dict.fromkeys(path.resolve() for path in folders):
        yield folder
        plan = read_json(folder / ".convert" / "plan.json") or {}
        if "source" in plan and "://" not in plan["source"]:
            yield (folder / plan["source"]).resolve()
        for whole in (folder, folder.parent):
            if (whole / ".pipeline").is_dir():
                yield from (whole / name for name in ("metadata", "images", "data"))


def _sum_bytes(manifest: dict) -> int:
    return sum(part.get("bytes", 0) for part in manifest["parts"])


_READERS: dict[str, Callable] = {"filter": read_filter, "download": read_download, "convert": read_convert}
