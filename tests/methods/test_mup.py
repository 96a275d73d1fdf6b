"""µP: what updates change of activations does not depend on the width, and it does without."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import parse_arguments
from paddle import nn
from tiny_model import make_batch

from ppldm.families.base import get_family
from ppldm.families.ldm import LdmConfig
from ppldm.families.ldm_build import build_ldm
from ppldm.methods.base import attach_methods, read_methods
from ppldm.methods.mup import RATE as FACTOR
from ppldm.methods.mup import _follow
from ppldm.training.optimizer import build_optimizer
from ppldm.training.prepare import prepare
from ppldm.utils.errors import ConfigError
from tests.families.test_laws import assert_same_run, train

WIDTHS = (8, 16, 32, 64)
UPDATES, RATE = 4, 2e-3


def config_of(tiny, width: int, **changes) -> str:
    """The file of the tiny UNet of another width."""
    config = json.loads(Path(tiny.config("unet")).read_text())
    config |= {"block_out_channels": [width, 2 * width], "norm_num_groups": 4, **changes}
    path = tiny.folder / f"unet-{width}-{'-'.join(map(str, changes.values()))}.json"
    path.write_text(json.dumps(config))
    return str(path)


def model_of(tiny, width: int, base: int | None, seed: int, **changes):
    arguments = LdmConfig(
        vae_name_or_path=tiny.vae,
        text_encoder_config_file=tiny.config("ldmbert"),
        unet_config_file=config_of(tiny, width, **changes),
        model_max_length=12,
        freeze_text_encoder=True,
    )
    model = build_ldm(arguments, vocab_size=100, seed=seed)
    if base:
        attach_methods(model, read_methods([f"mup:base={config_of(tiny, base, **changes)}"], arguments), seed)
    return model


def optimizer_of(model, rate=RATE):
    arguments = SimpleNamespace(
        learning_rate=rate, scale_lr=False, lr_batch_size=1, warmup_steps=0, warmup_ratio=0.0, lr_end=0.0, min_lr=0.0,
        lr_scheduler_type="constant", num_cycles=0.5, power=1.0, max_grad_norm=0.0, decay_norms_and_biases=True,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-12, weight_decay=0.0, sharding="",
    )  # fmt: skip
    return build_optimizer(model.trained_parameters(), {}, arguments, 100, 4)[0]


def changes(tiny, width: int, base: int | None, seed: int) -> dict[str, float]:
    """The root mean square of what some updates change of the outputs of layers, by name."""
    model = model_of(tiny, width, base, seed)
    model.train()
    optimizer, batch, seen = optimizer_of(model), make_batch(8, seed), {}
    layers = {"down": model.unet.down_blocks[1].resnets[0], "middle": model.unet.mid_block,
              "up": model.unet.up_blocks[0].resnets[0], "end": model.unet.conv_out}  # fmt: skip
    for name, layer in layers.items():
        layer.register_forward_post_hook(lambda _, given, made, name=name: seen.__setitem__(name, made.numpy()))
    model.loss(batch)
    before = dict(seen)
    for _ in range(UPDATES):
        model.loss(batch).value.backward()
        optimizer.step()
        optimizer.clear_grad()
    model.loss(batch)
    return {name: float(np.sqrt(np.mean((seen[name] - before[name]) ** 2))) for name in layers}


def slopes(tiny, base: int | None) -> list[float]:
    """By layer: by which power of the width its change grows."""
    found = [[*changes(tiny, width, base, seed=1).values()] for width in WIDTHS]
    return np.polyfit(np.log(WIDTHS), np.log(found), 1)[0].tolist()


def test_what_updates_change_does_not_grow_with_the_width(tiny):
    """The heads of attention grow too: there are as many at each width."""
    assert max(map(abs, slopes(tiny, 8))) < 0.25
    assert min(slopes(tiny, None)) > 0.3


def test_a_network_that_is_its_own_base_stays_as_it_is(tiny):
    plain, same = model_of(tiny, 16, None, 3), model_of(tiny, 16, 16, 3)
    for one, other in zip(plain.unet.parameters(), same.unet.parameters(), strict=True):
        assert (one.numpy() == other.numpy()).all()
    optimizer_of(same)
    assert {one.optimize_attr["learning_rate"] for one in same.unet.parameters()} == {1.0}


def test_rates_and_first_weights_are_by_the_inputs(tiny):
    model, base = model_of(tiny, 32, 8, 3), model_of(tiny, 8, None, 3)
    optimizer_of(model)
    own, there = (dict(one.unet.named_parameters()) for one in (model, base))
    rms = {name: float((one.square().mean() / there[name].square().mean()).sqrt()) for name, one in own.items()
           if float(there[name].square().mean())}  # fmt: skip
    attention = "down_blocks.0.attentions.0.transformer_blocks.0"
    for name, rate, first in (
        ("conv_in.weight", 1.0, 1.0),
        ("conv_in.bias", 1.0, None),
        ("down_blocks.0.resnets.0.conv1.weight", 1 / 4, 1 / 2),
        ("time_embedding.linear_2.weight", 1 / 4, 1 / 2),
        (f"{attention}.attn1.to_k.weight", 1 / 4, 1 / 2),
        (f"{attention}.attn1.to_q.weight", 1 / 8, 1 / 4),
        (f"{attention}.attn2.to_v.weight", 1.0, 1.0),
        ("conv_norm_out.weight", 1.0, 1.0),
        ("conv_out.weight", 1 / 4, None),
    ):
        assert own[name].optimize_attr["learning_rate"] == pytest.approx(rate), name
        assert first is None or rms[name] == pytest.approx(first, rel=1e-3), name
    assert not float(own["conv_out.weight"].abs().max())


def test_first_weights_of_an_output_are_by_its_inputs():
    """Where no more come out, nothing adds up over the width: an output layer's own rule."""
    (inner, base_inner), (end, base_end) = ([nn.Linear(*shape).weight for shape in shapes]
                                            for shapes in (((512, 64), (32, 4)), ((512, 4), (32, 4))))  # fmt: skip
    for wide, base, divided in ((inner, base_inner, 4), (end, base_end, 16)):
        wide.set_value(wide * 7)
        _follow(wide, base, 1.0)
        assert float(wide.square().mean() / base.square().mean()) ** 0.5 == pytest.approx(1 / divided, rel=1e-4)
        assert wide.optimize_attr[FACTOR] == 1 / 16


@pytest.mark.parametrize(
    "words, settings, said",
    [
        ("mup", {}, "name the network that the learning rate is of"),
        ("mup:base=nowhere.json", {}, "nowhere.json"),
        ("mup:base={}", {"unet_name_or_path": "somewhere"}, "it sets the first weights of a new unet"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tiny, words, settings, said):
    with pytest.raises(ConfigError, match=said):
        read_methods([words.format(tiny.config("unet"))], LdmConfig(**settings))


def test_a_base_of_other_layers_is_refused(tiny):
    with pytest.raises(ConfigError, match="has other layers"):
        other = config_of(tiny, 8, layers_per_block=2)
        attach_methods(model_of(tiny, 16, None, 3), read_methods([f"mup:base={other}"], LdmConfig()), 3)


def test_joined_heads_of_another_width_are_refused(tiny):
    """One matrix makes queries, keys and values: it has one rate. More heads of the same width are right."""
    config = json.loads(Path(tiny.config("uvit")).read_text())
    for name in ("num_attention_heads", "attention_head_dim"):
        path = tiny.folder / f"uvit-{name}.json"
        path.write_text(json.dumps({**config, name: 2 * config[name]}))
        words = [*tiny.flags(tiny.folder / "mup"), "--methods", f"mup:base={tiny.config('uvit')}"]
        place = words.index("--unet_config_file")
        words[place : place + 2] = ["--transformer_config_file", str(path), "--train_text_encoder"]
        given = parse_arguments(words, True, get_family("uvit").Config)
        if name == "num_attention_heads":
            prepare(*given)
        else:
            with pytest.raises(ConfigError, match="heads of another width"):
                prepare(*given)


@pytest.mark.turn("a method's run goes on, by either loop", 1)
def test_both_loops_and_a_resume_are_the_same(tiny, tmp_path):
    settings = {"unet_config_file": config_of(tiny, 16), "methods": (f"mup:base={config_of(tiny, 8)}",)}
    settings |= {"size_conditioning": None, "size_conditioning_drop": None}
    train(tiny, "ldm", tmp_path / "straight", **settings)
    train(tiny, "ldm", tmp_path / "trainer", kind="trainer", **settings)
    assert_same_run(tmp_path / "trainer", tmp_path / "straight")
    shutil.rmtree(tmp_path / "straight/checkpoint-4")
    assert train(tiny, "ldm", tmp_path / "straight", **settings).start_step == 2
    assert_same_run(tmp_path / "straight", tmp_path / "trainer")


def test_muon_has_rules_of_its_own(tiny, tmp_path):
    with pytest.raises(ConfigError, match="--optimizer muon is not for --methods mup"):
        train(tiny, "ldm", tmp_path / "run", methods=(f"mup:base={tiny.config('unet')}",), optimizer="muon")
