"""What doctor sees once paddle is there: device, memory, data, captions, names of models, and the forecast.

Hours, disk and cost follow from the seconds of an update: those of a run's log, or on a CPU of updates that are timed.
Where neither can be, on a CPU, the least hours, by the operations of its convolutions and matrix products."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...config.network_files import KNOWN_MODELS
from ...config.option import identity_of, options
from ...config.recipe import Recipe
from ...config.training import TrainingOptions
from ...data.filelist import Source, take_fingerprint
from ...data.formats.index import IndexSummary
from ...data.formats.open import build_indexes, find_summary
from ...data.inputs import Tokens
from ...data.select.selection import Selection
from ...data.text.tokenizer import load_tokenizer
from ...families.base import get_family
from ...families.ldm_build import tokenizer_source
from ...networks.configs import check_tokenizer_fit
from ...utils.errors import ConfigError, ModelError, PpldmError
from ...utils.machine import devices, resources
from ...utils.processes.ranks import World
from ...utils.store.cache import size_of
from ...utils.text import count_of
from ...utils.variables import is_offline, network_forbidden, read
from ...weights.fetch import packaged_or, split_name
from ...weights.folders import one_run
from .. import rows
from ..averages.snapshots import DEFAULT_NUMBER
from ..checkpoint import find_checkpoint, read_manifest
from ..commands.dry_run import ENDLESS
from ..metrics import METRICS_FILE, read_metrics
from ..optimizer import is_mixed
from ..prepare import settings_identity, without_secrets
from ..resume import compare_data, differences
from ..run_folder import check_output
from .machine import Finding, examine, judged, look_at_disk

_SECONDS = 10.0  # for the hub's answer
_TIGHT = 0.85  # of the memory that is there: the estimate is that exact
_FIRST_LINES = 1  # of a log, in which compiling and first reads are counted
_LONG_HOURS = 48  # of a run on a CPU, which hardly anybody means to wait for
# Of the matrix products by which the speed is measured: so short that other programs do not interrupt all of them.
_SIDE, _PRODUCTS = 384, 64
_INDEXED_BYTES = 1 << 30  # of parts without an index, for which it is made here; more take minutes
_INDEX_BYTES_A_SECOND = 5e7
_MANY_EPOCHS = 1000
_ACCEPT = "resume with the same, add --accept_changes %s, or give another --output_dir"
_MANY_BAD = 0.01  # share of the rows looked at


def look_at_run(recipe: Recipe, given, found: list[Finding], facts: dict) -> list[Finding]:
    """`found`, and what else there is; `facts` take in the memory by purpose and the forecast."""
    found = found + examine("device", _look_at_device, recipe)
    resumed, missing = [], []  # (checkpoint, manifest) that the run goes on from; models that cannot be had
    found += examine("output", _look_at_output, recipe, resumed)
    found += (access := examine("access", _look_at_access, recipe, missing))
    found += examine("memory", _look_at_memory, recipe, given, facts)
    seen, steps = _look_at_data(recipe, given.num_devices, resumed)
    found += seen
    for checkpoint in resumed:
        found += examine("settings", _look_at_settings, recipe, given.num_devices, steps, *checkpoint)
    again = [one for one in found if one.status == "error" and any(name in one.text for name in missing)]
    found = [one for one in found if one in access or one not in again]
    would_run, done = all(one.status != "error" for one in found), resumed[0][1]["global_step"] if resumed else 0
    found = found + examine("forecast", _look_ahead, recipe, given, steps, facts, would_run, done)
    # An error that was met before is said once, as that of a model that is not there by all who look into it.
    said = [one.text if one.status == "error" else None for one in found]
    return [one for place, one in enumerate(found) if said[place] is None or said[place] not in said[:place]]


def _look_at_device(recipe: Recipe) -> Iterator[Finding]:
    devices.use_device(None if recipe.training.device == devices.DEFAULT_DEVICE else recipe.training.device)
    devices.check_precision(recipe.training.bf16, recipe.training.fp16, devices.current_device())
    half = "bf16" if recipe.training.bf16 else "fp16" if recipe.training.fp16 else ""
    fix = f"give --{half} False, or use a device that has it" if half and not is_mixed(recipe.training) else ""
    yield judged("device", f"{devices.device_name()}" + (", which has no half precision" if fix else ""), warning=fix)


def _look_at_output(recipe: Recipe, resumed: list[tuple[Path, dict]]) -> Iterator[Finding]:
    """What the run would go on from; `resumed` takes in checkpoint and manifest."""
    arguments = recipe.training
    folder = Path(arguments.output_dir)
    check_output(arguments, folder)
    checkpoint = None if arguments.overwrite_output_dir else find_checkpoint(folder, arguments.resume_from_checkpoint)
    if checkpoint is None:
        yield judged("output", f"{folder} {'begins anew' if folder.is_dir() and any(folder.iterdir()) else 'is new'}")
        return
    resumed.append((checkpoint, read_manifest(checkpoint)))
    yield judged("output", f"the run goes on from {checkpoint}")


def _look_at_settings(recipe: Recipe, num_devices: int, max_steps: int, checkpoint: Path, manifest: dict):
    """In which settings the run that left a checkpoint differs. max_steps: 0 where they are not known yet."""
    arguments, then = recipe.training, manifest["identity"]
    now = settings_identity(arguments, recipe.data, arguments.samples_of_update(num_devices), max_steps)
    now |= identity_of(recipe.model) | get_family(recipe.family).identity(recipe.model, recipe.data)
    now = without_secrets(now, arguments.written, recipe.data, recipe.model)
    skipped = {*arguments.accept_changes} | ({"max_steps"} if not max_steps else set())
    changed = {key: differences(key, then.get(key, value), value) for key, value in now.items() if key not in skipped}
    if said := [f"{what} {was}, this run has {now}" for found in changed.values() for what, was, now in found]:
        names = " ".join(key for key, found in changed.items() if found)
        yield Finding("settings", "error", f"{checkpoint} was trained with {'; '.join(said)}", _ACCEPT % names)


def _look_at_access(recipe: Recipe, missing: list[str]) -> Iterator[Finding]:
    """That the hub gives the models that are named, or usual; `missing` takes in the names of the others."""
    model = recipe.model
    flags = {getattr(model, name): name for name, stated in options(type(model)).items() if stated.kind == "model"}
    if not getattr(model, "starts_from_pipeline", True):
        flags = {name: f"{component}_name_or_path" for component, name in model.component_names().items()} | flags
    for name, flag in flags.items():
        here = not name or name in KNOWN_MODELS or Path(packaged_or(name)).expanduser().exists() or "://" in name
        if not here and not is_offline(getattr(model, "offline", False)):
            yield (found := _ask_hub(flag, name))
            missing += [name] if found.status == "error" and "/" in name else []  # others may stand in any text


def _ask_hub(flag: str, name: str) -> Finding:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    from ...utils.machine.hub_names import network_errors

    repository = split_name(name)[0]
    place = repository["repo_id"]
    try:
        snapshot_download(**repository, local_files_only=True, allow_patterns=["*.json"])
        return judged("access", f"{place} is in the cache")
    except (OSError, ValueError):
        pass  # it is not; the hub is asked
    try:
        HfApi(endpoint=read("HF_ENDPOINT") or None).model_info(**repository, timeout=_SECONDS)
    except HfHubHTTPError as error:
        status = error.response.status_code
        denied = "log in again (huggingface-cli login), or set HF_TOKEN: a token may have expired, or lack the right"
        fix = denied if status in (401, 403) else f"check --{flag}, or download the model first"
        return Finding("access", "error", f"the hub answers {status} for {place}", fix)
    except (*network_errors(), OSError):
        fix = f"check --{flag}, name a mirror in HF_ENDPOINT, or download the model elsewhere and give its folder"
        return Finding("access", "error", f"there is no folder {name} here, and the hub cannot be reached", fix)
    return judged("access", f"the hub has {place}")


def _look_at_memory(recipe: Recipe, given, facts: dict) -> Iterator[Finding]:
    from .. import prepare  # noqa: F401 (what a run loads is part of its memory)
    from .memory import estimate, loader_bytes

    memory, anonymous = estimate(recipe, given.num_devices), resources.process_memory_bytes("RssAnon")
    facts["memory"] = memory.by_purpose
    facts["checkpoint_bytes"], facts["bytes_on_disk"] = memory.on_disk.get("checkpoint"), memory.on_disk
    facts["operations_an_update"] = memory.operations * recipe.training.accumulation_for(given.num_devices)
    facts["loader_bytes"] = loader_bytes(memory, recipe.training.dataloader_num_workers, anonymous)
    yield from _look_at_loaders(recipe.training.dataloader_num_workers, given.devices_here, memory, anonymous, facts)
    there = resources.usable_memory_bytes()
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.by_purpose.items() if size >= 5e6)
    text = f"about {memory.total / 1e9:.2f} GB at the peak ({parts})"
    text += f", without the activations of {', '.join(memory.unknown)}" if memory.unknown else ""
    if there is None or "process" not in memory.by_purpose:
        yield judged("memory", text + "; compare with the memory of the device")
        return
    needed, processes = memory.total * given.devices_here, given.devices_here
    fix = "lower --per_device_train_batch_size and raise --gradient_accumulation_steps, or add --recompute"
    if processes > 1:
        text += f" for each of {processes} processes, {needed / 1e9:.2f} GB together"
        fix += ", or start fewer processes"
    warning, error = fix if needed > _TIGHT * there else "", fix if needed > there else ""
    yield judged("memory", f"{text}; this machine has {there / 1e9:.2f} GB", warning, error)


def _look_at_loaders(num_loaders: int, num_devices: int, memory, anonymous: int, facts: dict) -> Iterator[Finding]:
    """Is the memory that loaders and the processes that train need together free?"""
    free = resources.available_memory_bytes()
    if not num_loaders or free is None:
        return
    on_host = memory.total if "process" in memory.by_purpose else anonymous
    loaders = facts["loader_bytes"] * num_devices
    text = f"{count_of(num_loaders * num_devices, 'loader')} may take {loaders / 1e9:.2f} GB beside "
    text += f"{on_host * num_devices / 1e9:.2f} GB of training; {free / 1e9:.2f} GB are free"
    short = loaders + on_host * num_devices > free
    fix = "lower --dataloader_num_workers (0 loads in the process that trains), or free memory of this machine"
    yield judged("loaders' memory", text, warning=fix if short else "")


def _look_at_data(recipe: Recipe, num_devices: int, resumed: list) -> tuple[list[Finding], int]:
    """(what is found, updates of the run)."""
    sources, selected = [], []
    found = examine("parts", look_at_parts, recipe, sources)
    paths = ((path, source) for source in sources for path in source.parts)
    counted = all(isinstance(find_summary(*one), IndexSummary) for one in paths)
    if any(one.status == "error" for one in found) or not counted:
        return found, _updates(recipe, 0, num_devices)

    def select() -> Iterator[Finding]:
        selected.append(rows.select_training_rows(sources, recipe.data, recipe.training, World()))
        yield from look_at_rows(recipe, selected[0], num_devices)
        prints = take_fingerprint(sources, np.diff(selected[0].starts).tolist(), selected[0].contents)
        other = compare_data(resumed[0][0], resumed[0][1], prints) if resumed else None
        if other and "data" not in recipe.training.accept_changes:
            yield Finding("data", "error", f"{resumed[0][0]} was trained on other data: {other}", _ACCEPT % "data")

    found += examine("rows", select)
    if not selected:
        return found, _updates(recipe, 0, num_devices)
    found += examine("pictures", look_at_sizes, recipe, sources)
    max_length = getattr(recipe.model, "model_max_length", None)
    if max_length:
        fits = examine("tokenizer", _look_at_tokenizer, recipe)
        found += fits
        if fits and all(one.status == "ok" for one in fits):
            found += examine("captions", look_at_captions, recipe, sources, selected[0], max_length)
    return found, _updates(recipe, len(selected[0]), num_devices)


def look_at_parts(recipe: Recipe, sources: list[Source]) -> Iterator[Finding]:
    """That all parts are there, opened where they have no index; `sources` take in the lists. Raises FilelistError, and
    PartError for those that cannot be read."""
    sources.extend(rows.open_sources(recipe.data))
    paths = [(path, source) for source in sources for path in source.parts]
    missing = [(path, source) for path, source in paths if find_summary(path, source) is None]
    stale = [path for path, source in missing if Path(f"{path}.idx").exists()]
    num_bytes = sum(size_of(path) for path, _ in missing)
    if stale:
        text = f"{stale[0]}.idx, {len(stale)} in all, cannot be used: stale, damaged or of another format"
        yield Finding("indexes", "warning", text, "ppldm index, or the run makes them again")
    elif num_bytes > _INDEXED_BYTES:
        minutes = num_bytes / _INDEX_BYTES_A_SECOND / resources.count_usable_cores() / 60
        text = f"{len(missing)} of {count_of(len(paths), 'part')} have no index, "
        text += f"which takes about {minutes:.0f} minutes here"
        yield Finding("indexes", "warning", text, "ppldm index, once, before the run")
    if num_bytes <= _INDEXED_BYTES:
        for source in sources:
            build_indexes(source.parts, source, resources.count_usable_cores())
    yield judged("parts", f"{count_of(len(paths), 'part')} in {count_of(len(sources), 'list')}")


def look_at_rows(recipe: Recipe, selection: Selection, num_devices: int) -> Iterator[Finding]:
    """How many there are, beside a batch and beside all samples of a run."""
    batch, num_rows = recipe.training.samples_of_update(num_devices), len(selection)
    steps = rows.count_steps(recipe.training, num_rows, batch)
    if left := ", ".join(f"{count} {reason}" for reason, count in selection.skipped.most_common(3)):
        fix = "" if 2 * num_rows > selection.num_rows else "check --where and --resolution"
        yield judged("selection", f"{num_rows:,} of {selection.num_rows:,} rows are used ({left})", fix)
    epochs = steps * batch / num_rows
    until = "no --max_steps ends it" if steps >= ENDLESS else f"{steps:,} updates are {epochs:,.2f} epochs"
    text = (
        f"{num_rows:,} rows, {num_rows // num_devices:,} a device; {count_of(math.ceil(num_rows / batch), 'update')} "
    )
    text += f"of {batch:,} samples an epoch; {until}"
    fix = "lower --max_steps, or check --file_list" if epochs > _MANY_EPOCHS else ""
    if batch > num_rows:
        text += "; a batch is larger than the data, so that it holds rows twice"
        fix = "lower --per_device_train_batch_size or --gradient_accumulation_steps"
    yield judged("rows", text, warning=fix)


def look_at_sizes(recipe: Recipe, sources: list[Source]) -> Iterator[Finding]:
    """Pictures so large that decoding them holds up the training."""
    text, fix = rows.describe_large(sources, recipe.data)
    if text:
        yield Finding("pictures", "warning", text, fix)


def look_at_captions(recipe: Recipe, sources: list[Source], selection: Selection, max_length: int):
    """How the tokenizer fits the captions of some rows. Raises ConfigError."""
    tokenizer = load_tokenizer(tokenizer_source(recipe.model), max_length, getattr(recipe.model, "offline", False))
    sources = [replace(one, latents="off") for one in sources]  # captions are read, and no latents
    make_dataset = rows.dataset_maker(
        recipe.data, recipe.training.seed, inputs={"input_ids": Tokens(max_length)}, tokenizer=tokenizer
    )
    dataset = make_dataset(sources, selection=selection)
    found, bad = rows.measure_captions(dataset)
    looked_at = found.captions + bad.total()
    fixes = rows.remedies_for(found, max_length)
    reasons = ", ".join(f"{count} {reason}" for reason, count in bad.most_common(3))
    if bad.total() > _MANY_BAD * looked_at:
        fixes.append("`ppldm verify` names the bad rows")
    text = f"of {found.captions}, {found.describe(max_length)}"
    text += f"; {bad.total()} of {count_of(looked_at, 'row')} looked at cannot be used ({reasons})" if bad else ""
    yield judged("captions", text, warning=", and ".join(fixes))


def _updates(recipe: Recipe, num_rows: int, num_devices: int) -> int:
    """How many the run has; 0 where only rows that are not known yet would tell, and where they are refused."""
    try:
        return rows.count_steps(recipe.training, num_rows, recipe.training.samples_of_update(num_devices))
    except ConfigError:
        return 0


def _look_at_tokenizer(recipe: Recipe) -> Iterator[Finding]:
    """Its words and the captions' length beside the text encoder's, where that has weights of its own."""
    source, max_length = tokenizer_source(recipe.model), recipe.model.model_max_length
    tokenizer = load_tokenizer(source, max_length, getattr(recipe.model, "offline", False))
    family = get_family(recipe.family)
    places = family.places(recipe.model) if hasattr(family, "places") else {}
    network = family.networks(recipe.model, recipe.data).get("text_encoder")
    if network and places.get("text_encoder"):
        try:
            check_tokenizer_fit(network.config, tokenizer.vocab_size, max_length)
        except ModelError as error:
            raise ModelError(f"{source}: {error} (--tokenizer_name)") from error
    yield judged("tokenizer", f"{source}: {tokenizer.vocab_size:,} words, captions of {max_length} tokens")


def _look_ahead(recipe: Recipe, given, max_steps: int, facts: dict, would_run: bool, done: int) -> Iterator[Finding]:
    """would_run: nothing was found that would stop the run. done: updates of the checkpoint that it goes on from."""
    if done >= max_steps > 0:
        yield judged("forecast", f"nothing is left to do: the checkpoint has {count_of(done, 'update')}")
        return
    is_cpu = devices.current_kind().is_cpu
    size, count = facts.get("checkpoint_bytes"), count_checkpoints(recipe.training, max(1, max_steps))
    more = other_bytes(recipe.model, facts.get("bytes_on_disk", {}), max(1, max_steps))
    yield from look_at_disk(recipe.training, size, count, more)
    if not max_steps or max_steps >= ENDLESS:
        open_end = "nothing ends this run; give --max_steps" if max_steps else "the rows say how long the epochs are"
        yield judged("forecast", f"none: {open_end}")
        return
    words = ""
    try:
        seconds = seconds_an_update(one_run(given.run) if given.run else Path(recipe.training.output_dir))
    except PpldmError:
        if given.run:
            raise
        operations = facts.get("operations_an_update", 0) if is_cpu else 0
        may_time = is_cpu and would_run and given.timing
        seconds, words = _time(recipe, given, facts) if may_time else (None, "")
        if seconds is None:
            least = least_hours(operations * given.devices_here, max_steps - done) if operations else 0.0
            yield from tell(None, least, is_cpu, words)
            return
    facts["forecast"] = forecast(
        seconds, max_steps - done, (size or 0) * count + more, given.num_devices, given.price_per_hour
    )
    yield from tell(facts["forecast"], is_cpu=is_cpu, how=words)


def _time(recipe: Recipe, given, facts: dict) -> tuple[float | None, str]:
    """(seconds of an update, how they were found) or (None, why none was timed)."""
    from .timed import time_updates

    operations = facts.get("operations_an_update", 0) // recipe.training.accumulation_for(given.num_devices)
    needed = sum(facts.get("memory", {}).values())
    try:
        with network_forbidden():
            return time_updates(recipe, given.devices_here, operations, needed, matrix_speed())
    except PpldmError as error:
        return None, str(error)


def seconds_an_update(folder: Path) -> float:
    """The median over the lines of a run's log. Raises ConfigError where it has none."""
    path = folder / METRICS_FILE
    records = read_metrics(path) if path.is_file() else []
    costs = [record["avg_batch_cost"] for record in records if record.get("avg_batch_cost")]
    costs = costs[_FIRST_LINES:] or costs
    if not costs:
        raise ConfigError(f"--run {folder} has no {METRICS_FILE} with a finished update; name the folder of a run")
    return statistics.median(costs)


def count_checkpoints(arguments: TrainingOptions, max_steps: int) -> int:
    """How many a run keeps at its end: the newest, --save_at among them, and those of --backup_every."""
    every = arguments.backup_every
    backups = set(range(every, max_steps + 1, every)) if every else set()
    single = {step for step in arguments.save_at if step < max_steps}
    saved = sorted({*range(arguments.save_steps, max_steps, arguments.save_steps), *single, max_steps, *backups})
    return len({*saved[-(arguments.save_total_limit or 0) :], *backups})


def other_bytes(config, on_disk: dict[str, int], max_steps: int) -> int:
    """What a run leaves beside its checkpoints: the exported model, and snapshots of the averages of --ema_posthoc."""
    every = getattr(config, "ema_posthoc_every", None) or max(1, max_steps // DEFAULT_NUMBER)
    return on_disk.get("exported", 0) + on_disk.get("snapshots", 0) * -(-max_steps // every)


def forecast(
    seconds: float, max_steps: int, disk_bytes: int, num_devices: int, price_per_hour: float | None
) -> dict[str, float]:
    """hours of the whole run, disk_gb at its end, and cost where the price of a device's hour is known."""
    hours = seconds * max_steps / 3600
    found = {"seconds_an_update": seconds, "hours": hours, "disk_gb": disk_bytes / 1e9}
    return found if price_per_hour is None else found | {"cost": hours * num_devices * price_per_hour}


def least_hours(operations: int, max_steps: int) -> float:
    """Of updates of so many floating-point operations on this CPU, at a speed that no training reaches."""
    return operations / matrix_speed() * max_steps / 3600


def matrix_speed() -> float:
    """Floating-point operations a second of this CPU in the fastest of some products of matrices."""
    import paddle

    matrix, seconds = paddle.ones([_SIDE, _SIDE]), []
    for _ in range(_PRODUCTS):
        start = time.perf_counter()
        paddle.matmul(matrix, matrix)
        seconds.append(time.perf_counter() - start)
    return 2 * _SIDE**3 / min(seconds)


def tell(found: dict[str, float] | None, least: float = 0.0, is_cpu: bool = False, how: str = "") -> Iterator[Finding]:
    """The forecast as a line; None where no update was measured, and then `least` hours, where they are known. how: it
    was measured, or why it was not."""
    hours, how = found["hours"] if found else least, f" ({how})" if how else ""
    fix = "take a smaller model, --resolution or --max_steps (`ppldm init` proposes some), or another device"
    if found:
        text = f"{found['seconds_an_update']:.3g} s an update{how}, {_words(hours)}, {found['disk_gb']:.3g} GB of disk"
        text += f", cost {found['cost']:.2f}" if "cost" in found else ""
    else:
        text = f"at least {_words(least)}, at the speed of matrix products on this CPU; " if least else ""
        text += f"no update was measured{how}: --run FOLDER takes its seconds from a run's log"
    yield judged("forecast", text, warning=fix if is_cpu and hours > _LONG_HOURS else "")


def _words(hours: float) -> str:
    """In the unit that a person would take."""
    if hours >= 24 * 365:
        return f"{hours / 24 / 365:,.0f} years"
    if hours >= 48:
        return f"{hours / 24:,.0f} days"
    return f"{hours:.3g} h" if hours >= 1 else f"{hours * 60:.3g} min" if hours * 60 >= 1 else f"{hours * 3600:.2g} s"
