"""Looking at a model leaves no trace in its training; what is seen is a function of (weights, seed)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ppldm.data.dataset import TextImageDataset
from ppldm.data.filelist import write_filelist
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare as prepare_run
from ppldm.training.prepare import read_validation_prompts
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.training.validation import undisturbed, validation_loss
from ppldm.utils.errors import ConfigError, FilelistError
from ppldm.utils.processes.ranks import World, gather_in_order, shard

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def held_out(tiny, tmp_path_factory):
    """(filelist list of part 0 to train on, that of part 1 to validate on)."""
    folder = tmp_path_factory.mktemp("held_out")
    for number, name in enumerate(("train", "test")):
        write_filelist(folder / f"{name}.filelist", [str(tiny.folder / f"part-{number:05d}.gz")])
    return str(folder / "train.filelist"), str(folder / "test.filelist")


def prepare(tiny, held_out, folder, loop=True, **changes):
    settings = {"file_list": held_out[0], "validation_file_list": held_out[1], "validation_rows": 10, "max_steps": 3}
    flags = tiny.flags(folder, **{**settings, **changes})
    return prepare_run(*parse_arguments([*flags, "--do_train"], loop))


def train(kind, *args, **changes):
    run = prepare(*args, loop=kind == "loop", **changes)
    (run_loop if kind == "loop" else run_trainer)(run)
    return run


def validation_losses(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return {r["global_step"]: r["validation_loss"] for r in records if "validation_loss" in r}


def checkpoint(folder, step, name="model_state.pdparams"):
    return paddle.load(str(folder / f"checkpoint-{step}" / name), return_numpy=True)


def assert_equal_to_the_bit(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert (np.asarray(first[name]) == np.asarray(second[name])).all(), name


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_dealt_back_in_order(count, size):
    hands = [list(shard(count, World(rank, size))) for rank in range(size)]
    assert gather_in_order(hands) == list(range(count))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


@given(st.integers(1, 1000), st.integers(1, 50))
def test_rows_are_spread_without_repeats(num_rows, count):
    rows = TextImageDataset.spread(range(num_rows), count)
    assert len(rows) == len(set(rows)) == min(count, num_rows) and set(rows) <= set(range(num_rows))
    assert rows[0] == 0 and (count == 1 or rows[-1] == num_rows - 1)


def test_the_loss_is_a_function_of_weights_and_seed(tiny, held_out, tmp_path):
    run = prepare(tiny, held_out, tmp_path / "a", use_ema=True)
    first = run.validate()
    paddle.seed(99)
    assert run.validate() == first
    others = [prepare(tiny, held_out, tmp_path / f"seed-{seed}", seed=seed) for seed in (5, 6)]
    assert others[0].validate() == first != others[1].validate()
    state, rest = run.state, run.validate.args[1]
    assert sum(map(len, rest.places)) == 10 and {len(places) for places in rest.places} == {4, 2}
    samples = [run_batch for _, run_batch in rest.batches(World())]
    assert sum(len(batch["row_ids"]) for batch in samples) == 10
    with undisturbed(state):
        by_hand = [float(state.model.loss(b).value) for b in samples]
    assert first["validation_loss"] == np.average(by_hand, weights=[4, 4, 2])


def test_ranks_share_the_rows_and_agree_to_the_bit(tiny, held_out, tmp_path, monkeypatch):
    from ppldm.training import validation

    run = prepare(tiny, held_out, tmp_path / "a")
    alone, rows = run.validate(), run.validate.args[1]
    for size in (2, 3, 5):
        hands = [list(hand_of(run, rows, World(rank, size))) for rank in range(size)]
        monkeypatch.setattr(validation, "gather_objects", lambda value, world, hands=hands: hands)
        assert validation_loss(run.state, rows, World(0, size)) == alone


def hand_of(run, rows, world):
    """What a rank finds: number, size and what is measured of each of its batches."""
    with undisturbed(run.state):
        for number, batch in rows.batches(world):
            loss = run.state.model.loss(batch).value
            yield number, len(batch["row_ids"]), {"loss": float(loss)}


def test_nothing_is_disturbed(tiny, held_out, tmp_path):
    run = prepare(tiny, held_out, tmp_path / "a", use_ema=True)
    state = run.state
    for shadow in state.ema.shadow.values():
        shadow.set_value(shadow + 1.0)
    state.model.train()
    before = {name: p.numpy().copy() for name, p in state.model.named_parameters()}
    modes = [layer.training for layer in state.model.sublayers(include_self=True)]
    paddle.seed(7)
    expected = paddle.randn([3]).numpy()
    paddle.seed(7)
    with pytest.raises(RuntimeError), undisturbed(state):
        assert not state.model.training and not state.model.unet.training
        name = next(iter(state.ema.shadow))
        inside = dict(state.model.named_parameters())[name].numpy()
        assert (inside == before[name] + 1.0).all()
        paddle.randn([5])
        raise RuntimeError("whatever happens inside")
    assert_equal_to_the_bit(before, {name: p.numpy() for name, p in state.model.named_parameters()})
    assert modes == [layer.training for layer in state.model.sublayers(include_self=True)] and any(modes)
    assert (paddle.randn([3]).numpy() == expected).all()


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_looking_leaves_the_trajectory_as_it_is(tiny, held_out, tmp_path, kind):
    looks = {"image_logging_steps": 1, "validation_steps": 2, "validation_prompts": "picture 3"}
    train(kind, tiny, held_out, tmp_path / "on", use_ema=True, save_steps=3, **looks)
    train(kind, tiny, held_out, tmp_path / "off", use_ema=True, save_steps=3, validation_file_list=None)
    for name in ("model_state.pdparams", "ema_state.pdparams"):
        assert_equal_to_the_bit(checkpoint(tmp_path / "on", 3, name), checkpoint(tmp_path / "off", 3, name))
    curves = [[r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("on", "off")]
    assert curves[0] == curves[1]
    assert list(validation_losses(tmp_path / "on")) == [2, 3] and not validation_losses(tmp_path / "off")
    assert len(list((tmp_path / "on/samples").iterdir())) == 9


def test_a_resumed_run_sees_the_same_loss(tiny, held_out, tmp_path):
    train("loop", tiny, held_out, tmp_path / "run", max_steps=4, save_steps=2, validation_steps=1)
    straight = validation_losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint-4")
    run = train("loop", tiny, held_out, tmp_path / "run", max_steps=4, save_steps=2, validation_steps=1)
    assert run.start_step == 2 and validation_losses(tmp_path / "run") == straight
    assert list(straight) == [1, 2, 3, 4] and len(set(straight.values())) == 4


def test_held_out_rows_keep_their_captions_and_are_cut_at_the_centre(tiny, held_out, tmp_path):
    first = prepare(tiny, held_out, tmp_path / "a", caption_drop=1, random_crop=True, random_flip=True)
    again = prepare(tiny, held_out, tmp_path / "b", caption_drop=0, random_crop=False, random_flip=False)
    batches = [run.validate.args[1].batches(World()) for run in (first, again)]
    empty = first.dataset.tokenizer.encode([""])[0]
    for (_, one), (_, other) in zip(*batches, strict=True):
        assert all((one[name].numpy() == other[name].numpy()).all() for name in one if name != "skipped")
        assert not (one["input_ids"].numpy() == empty).all(axis=1).any()


def test_a_part_that_is_trained_on_is_not_held_out(tiny, held_out, tmp_path):
    with pytest.raises(ConfigError, match="part-00001.gz is in --validation_file_list and in --file_list"):
        prepare(tiny, held_out, tmp_path / "a", file_list=tiny.file_list)


def test_prompts_are_words_or_files(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\ta remark\n\na dog\n")
    values = ["one fish", str(tmp_path / "prompts.txt"), "两条鱼" * 200]
    assert read_validation_prompts(values) == ["one fish", "a cat", "a dog", "两条鱼" * 200]
    assert read_validation_prompts([]) == []
    with pytest.raises(ConfigError, match="cannot read the prompts"):
        read_validation_prompts([str(tmp_path / "nowhere.txt")])


def test_prompts_and_scales_give_the_grids(tiny, held_out, tmp_path):
    words = ["--validation_prompts", *(f"picture {n}" for n in range(9)), "--validation_guidance_scales", "1", "3"]
    flags = tiny.flags(tmp_path / "run", max_steps=1, image_logging_steps=1)
    run = prepare_run(*parse_arguments([*flags, *words], loop=True))
    run_loop(run)
    pictures = {path.name: np.asarray(Image.open(path)) for path in (tmp_path / "run/samples").iterdir()}
    assert set(pictures) == {
        *("step-000001-ddim-samples-1.0.png", "step-000001-ddim-samples-3.0.png", "step-000001-reconstruction.png")
    }
    for scale in ("1.0", "3.0"):
        # Nine prompts in rows of eight, each with a caption: the ninth stands alone in its row.
        grid = pictures[f"step-000001-ddim-samples-{scale}.png"]
        first, second = grid[22 : 22 + (grid.shape[0] - 22) // 2], grid[22 + (grid.shape[0] - 22) // 2 :]
        eighth = grid.shape[1] // 8
        assert (first[:, -eighth:] < 255).any() and (second[:, :eighth] < 255).any()
        assert (second[:, eighth + 20 :] == 255).all()
    assert pictures["step-000001-reconstruction.png"].shape[0] == 22 + 2 * (22 + 32)  # a title, and one for each row


def rows_of(path) -> list[np.ndarray]:
    """The rows of pictures, [32, W, 3], of a sheet."""
    sheet = np.asarray(Image.open(path).convert("RGB"))[22:, : 4 * 32]
    return [sheet[top + 22 : top + 54] for top in range(0, len(sheet), 54)]


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_predictions_and_unaveraged_samples_leave_no_trace(tiny, held_out, tmp_path, kind):
    looks = {"image_logging_steps": 2, "draw_predictions": True, "draw_unaveraged": True}
    train(kind, tiny, held_out, tmp_path / "on", use_ema=True, save_steps=3, max_steps=2, **looks)
    train(kind, tiny, held_out, tmp_path / "off", use_ema=True, save_steps=3, max_steps=2, image_logging_steps=0)
    assert [one["loss"] for one in read_metrics(tmp_path / "on/metrics.jsonl")] == [
        one["loss"] for one in read_metrics(tmp_path / "off/metrics.jsonl")
    ]
    assert_equal_to_the_bit(checkpoint(tmp_path / "on", 2), checkpoint(tmp_path / "off", 2))
    folder, tags = tmp_path / "on/samples", ("ddim-samples-1.0", "ddim-samples-7.5", "reconstruction")
    names = {f"step-000002-{tag}{kind}.png" for tag in tags for kind in ("", "-unaveraged")}
    assert {path.name for path in folder.iterdir()} == names
    averaged, plain = (rows_of(folder / f"step-000002-reconstruction{kind}.png") for kind in ("", "-unaveraged"))
    assert [(one == other).all() for one, other in zip(averaged, plain, strict=True)] == [True, True, True, False]


def test_predictions_are_those_of_the_loss(tiny, held_out, tmp_path):
    """Of a batch: x_t at its own noise levels, and the x_0 that the network says of it."""
    from ppldm.diffusion.guided import to_pictures
    from ppldm.diffusion.process import add_noise

    run = prepare(tiny, held_out, tmp_path / "run", image_logging_steps=1, draw_predictions=True)
    batch, model = next(iter(run.batches())), run.state.model
    pictures, _ = run.draw(batch)
    assert model.watched is None
    Image.fromarray(np.pad(pictures["reconstruction"], ((22, 0), (0, 0), (0, 0)))).save(tmp_path / "sheet.png")
    original, decoded, noised, predicted = rows_of(tmp_path / "sheet.png")
    model.eval()
    with paddle.no_grad():
        latents = model.latents(batch["posterior_noise"], pixel_values=batch["pixel_values"])
        scales = model.process.scales(model.levels[batch["timesteps"]].reshape([-1, 1, 1, 1]))
        noisy = add_noise(latents, batch["noise"], scales)
        said = model.predict(noisy, batch["timesteps"], batch["input_ids"])
        wanted = [latents, noisy, model.process.picture(said, noisy, scales)]
        wanted = [np.concatenate(list(to_pictures(model.decode(one))), axis=1) for one in wanted]
    assert (np.concatenate(list(batch["pixel_values"].numpy().transpose(0, 2, 3, 1)), axis=1) == original).all()
    assert all((one == other).all() for one, other in zip(wanted, (decoded, noised, predicted), strict=True))


@pytest.mark.turn("what holds on one rank holds on two", 2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no_trainer", "trainer"])
def test_two_processes_look_together_and_leave_no_trace(tiny, held_out, tmp_path, kind):
    """Two ranks, drawing and validating or not: the same weights. With a rate of 0, the loss of one rank to the bit."""
    prompts = {"validation_prompts": "picture 3", "image_logging_steps": 2, "validation_steps": 2, "logging_steps": 2}
    common = {"file_list": held_out[0], "max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2}
    validation = {"validation_file_list": held_out[1], "validation_rows": 5, **prompts}
    launch(kind, tiny.flags(tmp_path / "on", **common, **validation), tmp_path / "log-on")
    launch(kind, tiny.flags(tmp_path / "off", **common), tmp_path / "log-off")
    assert_equal_to_the_bit(checkpoint(tmp_path / "on", 2), checkpoint(tmp_path / "off", 2))
    last = read_metrics(tmp_path / "on/metrics.jsonl")[-1]
    assert last["images_per_second"] == pytest.approx(2 * last["images_per_second_per_device"])
    names = {path.name for path in (tmp_path / "on/samples").iterdir()}
    assert names == {f"step-000002-{tag}.png" for tag in ("ddim-samples-1.0", "ddim-samples-7.5", "reconstruction")}
    run = prepare(tiny, held_out, tmp_path / "one", per_device_train_batch_size=2, validation_rows=5)
    run.state.model.set_state_dict(checkpoint(tmp_path / "on", 2))
    assert run.validate()["validation_loss"] == last["validation_loss"]


def launch(kind, flags, log_dir):
    script = ROOT / f"examples/train_txt2img_laion400m_{kind}.py"
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(log_dir)]
    command += [str(script), *flags, *(["--do_train"] if kind == "trainer" else [])]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    output_dir = Path(flags[flags.index("--output_dir") + 1])
    assert (output_dir / "pipeline").is_dir(), done.stdout[-3000:] + done.stderr[-3000:]
    assert not (output_dir / ".ranks").exists()


def test_a_missing_list_is_blamed_on_its_own_flag(tiny, tmp_path):
    for flag in ("file_list", "validation_file_list"):
        with pytest.raises(FilelistError, match=f"^--{flag}: no filelist /nope; give a text file"):
            prepare_run(*parse_arguments(tiny.flags(tmp_path, **{flag: "/nope"}), loop=True))


def test_one_is_one_in_the_log(tiny, tmp_path, capsys):
    prepare_run(*parse_arguments(tiny.flags(tmp_path), loop=True))
    told = capsys.readouterr().err
    assert " 2 parts in 1 list from " in told and " x 1 rank on cpu" in told
