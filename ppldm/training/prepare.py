"""A training run from its settings, whatever family it is of."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import paddle

from .. import __version__
from ..config.data import DataOptions, caption_identity
from ..config.option import identity_of, options
from ..config.recipe import sections_of
from ..config.training import TrainingOptions
from ..data.dataset import TextImageDataset
from ..data.filelist import Source
from ..data.order import Mix
from ..data.shapes import group_size_of
from ..families.base import Family, check_family, get_family
from ..networks.configs import is_shifted
from ..networks.cpu_operators.layers import operators_are_usable
from ..networks.ema import ExponentialMovingAverage
from ..utils import variables
from ..utils.checksums import digest_of
from ..utils.errors import ConfigError
from ..utils.log import get_logger
from ..utils.machine import devices
from ..utils.processes.ranks import World, join, watch_ranks
from ..utils.text import count_of
from ..weights.components import encoder_digest
from ..weights.fill import component_of, describe_model
from ..weights.model_file import kind_of
from . import optimizer, rows
from .checkpoint import TrainingState, read_manifest
from .report import IntervalMetrics
from .run import TrainingRun
from .run_folder import SNAPSHOTS, prepare_output

if TYPE_CHECKING:
    from ..data.cached.run import EmbeddingsRule, LatentsRule
    from .averages.snapshots import SnapshotWriter


def prepare(config, data, arguments) -> TrainingRun:
    """Everything between the settings, a family's own `config` first, and the first update. Raises a PpldmError."""
    family = get_family(config.family)
    check_family(config, data, arguments)
    sources, held_out_sources = open_data(data)
    prompts = read_validation_prompts(arguments.validation_prompts or [])
    world = detect_world(arguments)
    settings = resolved_config(config, data, arguments)
    checkpoint = take_folder(arguments, world, settings)
    selection = rows.select_training_rows(sources, data, arguments, world)
    model = family.build(config, data, arguments.seed)
    latents = latents_rule(model, data) if any(one.latents != "off" for one in sources + held_out_sources) else None
    facts = {"inputs": model.inputs, "tokenizer": model.tokenizer, "latents": latents}
    make_dataset = rows.dataset_maker(data, arguments.seed, **facts)
    dataset = make_dataset(sources, selection=selection, embeddings=embeddings_rule(family, model, config, data))
    if dataset.latents:
        model.keep_moments = dataset.latents.keep
    if world.is_main:
        report_data(dataset, data, Path(arguments.output_dir))
    description = describe_model(family, model)
    global_batch_size = arguments.samples_of_update(world.size)
    group_size = group_size_of(data, arguments.per_device_train_batch_size)
    max_steps = rows.count_steps(arguments, len(dataset), global_batch_size)
    state, rate_ratios = make_state(family, config, model, arguments, max_steps, global_batch_size, world)
    identity = run_identity(arguments, data, dataset, group_size, global_batch_size, max_steps)
    identity |= identity_of(config) | family.identity(config, data)
    identity, accepted = without_secrets(identity, arguments.written, data, config), arguments.accept_changes
    start_step, unlogged = 0, {}
    if checkpoint or accepted:
        from .resume import restore

        start_step, unlogged = restore(checkpoint, state, identity, description, dataset.fingerprint, accepted)
    sizes = len(dataset), max_steps, global_batch_size, sum(p.size for p in model.trained_parameters().values()) / 1e6
    get_logger().info("%d rows, %d updates of %d samples, %.1f M trained parameters", *sizes)
    validate = None
    if held_out_sources:
        from .validation import make_validation

        validate = make_validation(held_out_sources, state, dataset, make_dataset, data, arguments, world)
    return TrainingRun(
        arguments=arguments,
        world=world,
        state=state,
        dataset=dataset,
        mix=Mix(dataset.list_sizes, dataset.weights, arguments.seed, dataset.buckets, group_size),
        max_steps=max_steps,
        global_batch_size=global_batch_size,
        identity=identity,
        config=settings,
        description=description,
        checkpoint=checkpoint,
        start_step=start_step,
        interval=IntervalMetrics(world, model.process is not None, unlogged, data.max_skipped_share),
        rate_ratios=rate_ratios,
        family=family,
        model_settings=config,
        prompts=prompts,
        validate=validate,
        snapshots=snapshot_writer(config, state, arguments, max_steps),
    )


def open_data(data: DataOptions) -> tuple[list[Source], list[Source]]:
    """The lists of parts to train on, and those that are held out."""
    sources = rows.open_sources(data)
    if data.validation_file_list is None:
        return sources, []
    from .validation import open_held_out_sources

    return sources, open_held_out_sources(data, sources)


def take_folder(arguments: TrainingOptions, world: World, settings: dict) -> Path | None:
    """`prepare_output`, with the store of the folder, and without snapshots of averages that are to be made again."""
    store, folder = None, Path(arguments.output_dir)
    if arguments.output_store:
        from .output_store import OutputStore

        store = OutputStore(folder, arguments.output_store)
    checkpoint = prepare_output(arguments, world, settings, store)
    if world.is_main and (folder / SNAPSHOTS).is_dir():
        from .averages.snapshots import remove_later

        remove_later(folder, read_manifest(checkpoint)["global_step"] if checkpoint else 0)
    return checkpoint


def report_data(dataset: TextImageDataset, data, folder: Path) -> None:
    """Log how captions fit the tokenizer, and far too large pictures; draw the shapes of pictures into the folder."""
    if any(told := rows.describe_large(dataset.sources, data)):
        get_logger().warning("%s; %s", *told)
    if dataset.tokenizer:
        rows.report_captions(dataset)
    if buckets := dataset.selection.buckets:
        from ..data.shapes import BUCKETS_FILE, draw_chart

        draw_chart(folder / BUCKETS_FILE, buckets.report(), dataset.selection.skipped)


def latents_rule(model, data) -> "LatentsRule | None":
    """Which cached latents are those of a model's autoencoder; None of a model that has none to be cached."""
    if model.autoencoder is None:
        return None
    from ..data.cached.run import LatentsRule

    vae = model.components[model.autoencoder].layer
    digest = encoder_digest(component_of(model.autoencoder, vae))
    factor = None if is_shifted(vae.config) else float(vae.config.get("scaling_factor", 1.0))
    return LatentsRule(digest, factor, data.latents_dtype)


def embeddings_rule(family: Family, model, config, data) -> "EmbeddingsRule | None":
    """Which cached embeddings are those of a model's frozen text encoder; None where none are asked for. Raises
    ConfigError for a model without such a text encoder."""
    if data.text_embeddings == "off":
        return None
    if model.caption_encoder is None:
        raise ConfigError("--text_embeddings cached is for models with a frozen text encoder; omit it")
    from ..cache.encoders import embeddings_key, several_key
    from ..data.cached.run import EmbeddingsRule

    if captions := getattr(model, "captions", None):
        own = {name: component_of(kind_of(family, name), one) for name, one in captions.encoders.items()}
        return EmbeddingsRule(
            several_key(own, model.tokenizer, captions, data.text_embeddings_dtype), model.empty_end is not None
        )
    kind = kind_of(family, model.caption_encoder)
    text_encoder = component_of(kind, model.components[model.caption_encoder].layer)
    projected = kind == "projected_text_encoder"
    key = embeddings_key(text_encoder, model.tokenizer, config.mask_pad_tokens, data.text_embeddings_dtype, projected)
    return EmbeddingsRule(key, empty_is_zeros=model.empty_end is not None)


def make_state(family: Family, config, model, arguments, max_steps: int, global_batch_size: int, world: World):
    """(what changes while training: model, optimizer, schedule, average and scaler; learning rates of groups)."""
    components = model.components.values()
    for component in components if arguments.recompute else ():
        if component.differentiated and component.recompute:
            component.recompute()
    if arguments.to_static:
        from .compiled import CompiledPrediction

        model.compiled_predict = CompiledPrediction(model, world)
    trained, decay = model.trained_parameters(), family.average(config)
    ratios, by_group = optimizer.learning_rate_ratios(model, config, arguments.learning_rate)
    alone = [name for name, one in model.components.items() if one.clipped_alone]
    kind = optimizer_kind(arguments, world, trained)
    adamw, rate = optimizer.build_optimizer(trained, ratios, arguments, max_steps, global_batch_size, alone, kind)
    kept = None
    if arguments.sharding == "stage3" and optimizer.is_sharded(adamw):
        from .distributed.parameters import ParameterShares

        kept = ParameterShares(model, adamw).own()
    offloaded = getattr(config, "offload_ema", False)
    average = ExponentialMovingAverage(trained, decay, kept, offloaded) if decay else None
    stds = getattr(config, "ema_posthoc", None) or ()
    posthoc = {}
    if stds:
        from ..methods.averages.ema_posthoc import PowerDecay

        posthoc = {std: ExponentialMovingAverage(trained, PowerDecay(std), kept, offloaded) for std in stds}
    optimizer.decorate(model, adamw, arguments)
    if optimizer.is_sharded(adamw):
        adamw.log_share()
    return TrainingState(model, adamw, rate, average, optimizer.make_scaler(arguments), posthoc), by_group


def optimizer_kind(arguments, world: World, trained: dict) -> Callable:
    """What makes the optimizer of the `trained` parameters that the settings and the device ask for."""
    kind = optimizer.FusedAdamW if arguments.fused_adamw else paddle.optimizer.AdamW
    kind = optimizer.CpuAdamW if operators_are_usable() else kind
    if arguments.optimizer == "muon":
        from ..methods.muon import muon

        kind = muon(kind, trained, arguments.muon_momentum, arguments.muon_nesterov)
    if arguments.optimizer == "adamw8bit":
        from ..methods.adamw8bit import adamw8bit

        kind = adamw8bit(kind, trained)
    if arguments.sharding and world.size > 1:
        from .distributed.sharding import sharded

        return partial(sharded(kind), world=world)
    if arguments.sharding:
        get_logger().info("--sharding %s does nothing here: there is one rank", arguments.sharding)
    return kind


def snapshot_writer(config, state: TrainingState, arguments, max_steps: int) -> "SnapshotWriter | None":
    """What keeps snapshots of the averages of `--ema_posthoc`; None without."""
    if not state.posthoc:
        return None
    from .averages.snapshots import DEFAULT_NUMBER, SnapshotWriter

    every = config.ema_posthoc_every or max(1, max_steps // DEFAULT_NUMBER)
    return SnapshotWriter(Path(arguments.output_dir), state.posthoc, every, config.ema_posthoc_dtype)


def read_validation_prompts(values: list[str]) -> list[str]:
    """The prompts of the files among `values`, and the other values themselves. Raises ConfigError."""
    prompts = []
    for value in values:
        if os.path.isfile(value) or value.endswith(".txt"):
            from ..inference.prompts import read_requests

            try:
                prompts += [request.prompt for request in read_requests(value)]
            except ConfigError as error:
                raise ConfigError(f"--validation_prompts: {error}; or give prompts") from error
        else:
            prompts.append(value)
    return prompts


def run_identity(
    arguments: TrainingOptions, data_arguments: DataOptions, dataset, group_size: int, global_batch_size: int, max_steps
) -> dict:
    """What decides which samples a step sees and what it makes of them, by name, JSON-ready. A checkpoint of another
    run differs in it. What only speed and memory depend on is not part of it."""
    buckets = dataset.buckets
    return {
        **settings_identity(arguments, data_arguments, global_batch_size, max_steps),
        "data": dataset.fingerprint.digest,
        "rows": len(dataset),
        "weights": dataset.weights,
        "buckets": buckets and [f"{width}x{height}" for height, width in buckets.shapes],
        "bucket_group_size": buckets and group_size,
        "latents": dataset.latents and data_arguments.latents_dtype,
        "text_embeddings": dataset.embeddings and data_arguments.text_embeddings_dtype,
        **(caption_identity(data_arguments) if dataset.tokenizer else {}),
    }


def settings_identity(arguments: TrainingOptions, data: DataOptions, global_batch_size: int, max_steps) -> dict:
    """What of it the settings say by themselves. max_steps: 0 where only the rows would tell."""
    where = rows.read_where(data)
    constant = "constant" in arguments.lr_scheduler_type
    return {
        "seed": arguments.seed,
        "where": None if where is None else str(where),
        "global_batch_size": global_batch_size,
        "max_steps": None if constant else max_steps,
        "precision": optimizer.precision_name(arguments),
        **identity_of(data, arguments),
    }


def without_secrets(identity: dict, written: dict[str, str], *groups) -> dict:
    """An identity of settings of `groups` in which a digest tells texts that came from the environment, whose
    expressions are `written`."""
    found = dict(identity)
    for name, stated in ((name, stated) for group in groups for name, stated in options(type(group)).items()):
        if stated.key in written and isinstance(found.get(name), str) and not stated.choices:
            found[name] = f"{written[stated.key]} (digest {digest_of(found[name])[:8]})"
    return found


def resolved_config(config, data: DataOptions, arguments: TrainingOptions) -> dict:
    """All settings by section, JSON-ready, for run.json; of what came from the environment the expression."""
    found = {"ppldm": __version__, "family": config.family, **sections_of(config, data, arguments)}
    for key, expression in arguments.written.items():
        section, _, name = key.rpartition(".")
        (found[section] if section else found)[name] = expression
    return found


def detect_world(arguments: TrainingOptions) -> World:
    """The ranks of this run, which can talk to each other from now on, on the device that is asked for. `arguments` get
    the accumulation that --global_batch_size asks for. Raises ConfigError for a device that there is not, or that
    cannot do what is asked of it, and for a batch that cannot be."""
    world = World.detect()
    arguments.gradient_accumulation_steps = arguments.accumulation_for(world.size)
    devices.use_device(arguments.device)
    kind = devices.current_kind()
    if world.size > 1:
        if kind != devices.installed_kind():  # the CPU, asked for where Paddle is made for more
            variables.set_for_libraries(devices.collective_variables(kind), replace=True)
        join(world, arguments.rank_timeout)
    watch_ranks(world, arguments.rank_timeout)
    device = devices.current_device()
    devices.check_precision(arguments.bf16, arguments.fp16, device)
    apply_switches(arguments)
    batch, accumulated = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    words = f"{batch} per device x {accumulated} accumulation x {count_of(world.size, 'rank')} on {device.name}"
    get_logger().info("global_batch_size %d = %s", batch * accumulated * world.size, words)
    optimizer.warn_of_cpu(arguments)
    return world


def apply_switches(arguments: TrainingOptions) -> None:
    """Set what the flags ask for, in this process; say so where they do nothing."""
    kind = devices.current_kind()
    for name in () if kind.exactness_switches else ("tf32", "cudnn_search"):
        if getattr(arguments, name):
            get_logger().warning("--%s does nothing on %s", name, kind.words)
    devices.set_exactness(arguments.tf32, arguments.cudnn_search)
