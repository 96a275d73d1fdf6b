"""What a checkpoint insists on is marked in the table of settings: the marks are made from what identifies a run."""

from types import SimpleNamespace

import pytest
from command_line import parse_arguments
from settings_table import settings_table

from ppldm.config.option import identity_of, options
from ppldm.config.recipe import groups_of
from ppldm.data.shapes import group_size_of, make_shapes
from ppldm.families.base import get_family, list_families
from ppldm.training import optimizer, prepare
from ppldm.training.rows import count_steps

CONTEXTS = ["", "--lr_scheduler cosine --max_steps -1", "--use_ema",
            "--buckets ratios --latents cached --num_crops 2",
            "--bf16 --text_embeddings cached --freeze_text_encoder --captions caption:1",
            "--buckets steps"]  # fmt: skip
OTHER = {
    "buckets": ["steps"], "bucket_ratios": [["1/1", "1/2"]], "bucket_step": [16], "where": ["width>9"],
    "global_batch_size": [36], "max_samples": [120], "captions": [{"caption": 1.0, "x": 2.0}], "layout": ["laion"],
    "bucket_min_side": [200], "bucket_max_side": [300], "max_aspect_ratio": [1.5], "ema_posthoc": [[0.05, 0.1]],
    "ema_start_iters": [7], "ema_iters": [7], "ema_beta": [0.5], "snr_gamma": [5.0], "max_steps": [77],
    "bucket_group_size": [3],
}  # fmt: skip


def entries(family, config, data, arguments) -> dict:
    """A run's identity as `prepare` makes it, of 100 rows, for whatever is not read from files."""
    shapes = SimpleNamespace(shapes=make_shapes(data)) if data.buckets != "off" else None
    facts = dict(
        fingerprint=SimpleNamespace(digest=(data.file_list, data.layout)), weights=None, buckets=shapes, tokenizer=True,
        latents=data.latents != "off", embeddings=data.text_embeddings != "off",
    )  # fmt: skip
    rows = type("Rows", (), {"__len__": lambda _: 100, **facts})()
    batch, group = arguments.samples_of_update(1), group_size_of(data, arguments.per_device_train_batch_size)
    found = prepare.run_identity(arguments, data, rows, group, batch, count_steps(arguments, 100, batch))
    return found | identity_of(config) | family.identity(config, data)


def others(stated, value) -> list:
    """Values unlike `value` that the option takes, as far as they can be made up."""
    if stated.name in OTHER:
        return OTHER[stated.name]
    if stated.choices:
        return [choice for choice in stated.choices if choice != value][:2]
    if stated.type is bool:
        return [not value]
    if stated.type in (int, float) and not stated.is_list and value is not None:
        tries = (stated.type(value + 1), stated.type(value / 2), stated.type(max(1, value - 1)))
        return [one for one in tries if one != value and (not stated.bounds or stated.bounds.hold(one))][:1]
    return [] if stated.is_list or stated.is_table or value is None else [f"{value}x"]


@pytest.mark.parametrize("name", ["ldm", "stable_diffusion"])
def test_every_setting_that_changes_a_runs_identity_is_marked_with_the_entry(name, monkeypatch):
    monkeypatch.setattr(optimizer, "precision_name", lambda one: str((one.bf16, one.fp16, one.fp16_opt_level)))
    family, tried = get_family(name), set()
    for context in CONTEXTS:
        words = [] if name == "ldm" else ["--model_name_or_path", "a/b"]
        words += [word for word in context.split() if name == "ldm" or word != "--freeze_text_encoder"]
        groups = parse_arguments(words, loop=True, config=family.Config)
        before = entries(family, *groups)
        for number, group in enumerate(groups):
            for stated in options(type(group)).values():
                value = getattr(group, stated.name)
                for other in others(stated, value):
                    setattr(group, stated.name, other)
                    try:
                        after = entries(family, *groups)
                    except Exception:  # noqa: BLE001 (settings that do not go together are others' to refuse)
                        after = before
                    setattr(group, stated.name, value)
                    changed = {key for key in before | after if before.get(key) != after.get(key)}
                    entry = stated.name if stated.identity or stated.part_of is True else stated.part_of
                    assert not changed or entry in changed, (number, stated.name, changed)
                    tried |= {stated.name} if changed else set()
    marked = {one.name for group in groups_of(family.Config) for one in options(group).values() if one.part_of}
    assert marked <= tried, marked - tried  # nothing is marked that changes nothing


def test_the_table_shows_the_marks():
    table = settings_table({name: get_family(name).Config for name in list_families()})
    lines = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    assert "*part of the run, as `precision`*" in lines["compute.bf16"]
    for key in ("data.where", "run.seed", "data.clean_captions", "data.keep_tags", "optimizer.learning_rate"):
        assert lines[key].endswith("*part of the run* |"), key
    assert "*part of the run, by content*" in lines["model.tokenizer_name"]
    assert "part of the run" not in lines["compute.dataloader_num_workers"]
