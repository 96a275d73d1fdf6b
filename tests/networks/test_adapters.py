"""Adapters: nothing is changed before they learn, only they learn, and what they learned can be merged."""

import numpy as np
import paddle
import pytest
from small_loras import differences
from tiny_model import make_batch, make_model

from ppldm.data.text.tokenizer import SPECIAL_TOKENS, CaptionTokenizer
from ppldm.families.ldm import LdmConfig
from ppldm.families.ldm_build import build_model, weights_of
from ppldm.networks.adapters import adapt
from ppldm.training.compiled import compile_predict
from ppldm.utils.errors import ConfigError
from ppldm.weights.lora.files import read_lora, write_lora
from ppldm.weights.lora.merge import lora_of, tokens_of

WORDS = [*SPECIAL_TOKENS, "dog", "dogs", "cat", "doggy", *(f"w{number}" for number in range(91))]
ALL = {
    "lora_rank": 3, "lora_alpha": 2.0, "lora_modules": ["attn", "conv", "fc"],
    "lora_components": ["unet", "text_encoder"], "train_tokens": ["<fido>=^dog", "[x]", "^cat$"],
}  # fmt: skip
CASES = [
    {"lora_rank": 1},
    {"lora_rank": 4, "lora_components": ["text_encoder"]},
    {"lora_rank": 2, "lora_modules": ["conv"]},
    {"train_tokens": ["<fido>=dog", "^cat"]},
    ALL,
]


def base(tiny, **changes):
    model = make_model(tiny, **changes)
    rng = np.random.default_rng(8)
    for parameter in model.unet.parameters():  # its zeroed last layers let nothing through
        parameter.set_value(parameter + rng.normal(0, 0.02, parameter.shape).astype(np.float32))
    model.tokenizer = CaptionTokenizer(WORDS, 12)
    return model


def adapted(tiny, seed=1, **asked):
    model = base(tiny, **asked)
    adapt(model, LdmConfig(**asked), seed)
    return model


def disturb(model, scale=0.2):
    """Adapters that have learned something."""
    rng = np.random.default_rng(2)
    for parameter in model.trained_parameters().values():
        parameter.set_value(parameter + rng.normal(0, scale, parameter.shape).astype(np.float32))


@pytest.mark.parametrize("asked", CASES)
def test_nothing_changes_before_the_first_update(tiny, asked):
    batch = make_batch(3)
    batch["input_ids"][:, 5] = 7
    assert (adapted(tiny, **asked)(**batch).value == base(tiny)(**batch).value).all()


@pytest.mark.parametrize("asked", CASES)
def test_they_alone_learn(tiny, asked):
    model = adapted(tiny, **asked)
    disturb(model)
    before = {name: value.numpy() for name, value in model.state_dict().items()}
    model.train()
    batch = make_batch(4)
    if "train_tokens" in asked:
        batch["input_ids"][:, 3] = 100
    model(**batch).value.backward()
    trained = model.trained_parameters()
    assert trained and {name.partition(".")[0] for name in trained} == set(model.adapters)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in trained), name
    assert all(np.abs(parameter.grad.numpy()).max() > 0 for parameter in trained.values())
    own = {name for name, component in model.components.items() if component.trained}
    assert own == set(model.adapters) and set(model.unsaved) == {"vae", "text_encoder", "unet"}
    for name, value in base(tiny).state_dict().items():
        assert (value.numpy() == before[name]).all(), name


@pytest.mark.parametrize("form, alpha", [("diffusers", 3.0), ("kohya", 2.0)])
def test_a_file_that_they_start_from_is_given_back_to_the_bit(tiny, tmp_path, form, alpha):
    """As it was written, whatever the form; layers that it lacks begin without a change."""
    asked = {"lora_rank": 3, "lora_alpha": alpha, "lora_modules": ["attn", "conv"]}
    model = adapted(tiny, **asked)
    disturb(model)
    file = write_lora(lora_of(model), tmp_path / "a.safetensors", form)

    def begin(**changes):
        config, again = LdmConfig(**asked | {"lora_alpha": None, "lora_from": str(file)} | changes), base(tiny)
        adapt(again, config, 1, read_lora(file).components)
        return again

    again = begin()
    assert differences(lora_of(again), lora_of(model)) == []
    assert (again(**make_batch(3)).value == model(**make_batch(3)).value).all()
    more = lora_of(begin(lora_modules=["attn", "conv", "time_emb"])).components["unet"]
    new = more.keys() - lora_of(model).components["unet"].keys()
    assert new and not any(more[name].up.any() for name in new)
    for changes, words in (({"lora_rank": 2}, "give --lora_rank 3 --lora_alpha"), ({"lora_alpha": 7.0}, "another rank"),
                           ({"lora_modules": ["attn"]}, "is not of --lora_modules attn; add its name"),
                           ({"lora_components": ["text_encoder"]}, "changes the unet; add it")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            begin(**changes)


@pytest.mark.parametrize("asked", [ALL, {"lora_rank": 1, "lora_modules": [""]}])
def test_merged_is_unmerged(tiny, asked):
    model = adapted(tiny, **asked)
    disturb(model)
    model.eval()
    whole = build_model(weights_of(model), "merged")
    batch = make_batch(3)
    batch["input_ids"][:, :5] = paddle.to_tensor([5, 6, 7, *([100, 101] if "train_tokens" in asked else [8, 9])])
    given = batch["noise"], batch["timesteps"], batch["input_ids"]
    one, other = (net.predict(*given).numpy() for net in (model, whole))
    assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()
    given[2][:, 3:5] = 9
    assert np.abs((model.predict(*given) - base(tiny).predict(*given)).numpy()).max() > 1e-2


@pytest.mark.parametrize("other", ["recompute", pytest.param("graph", marks=pytest.mark.slow)])
def test_recompute_and_graphs_change_nothing(tiny, other):
    found = []
    for way in ("plain", other):
        model = adapted(tiny, **ALL)
        disturb(model)
        model.train()
        for component in model.components.values():
            if way == "recompute" and component.differentiated and component.recompute:
                component.recompute()
        if way == "graph":
            model.compiled_predict = compile_predict(model)
        loss = model(**make_batch(2)).value
        loss.backward()
        gradients = {name: parameter.grad.numpy() for name, parameter in model.trained_parameters().items()}
        found.append({"loss": loss.numpy(), **gradients})
    # A graph has Paddle's own operators.
    assert all(np.abs(found[1][name] - one).max() <= 1e-5 * np.abs(one).max() + 1e-7 for name, one in found[0].items())


def test_the_draw_is_of_the_seed_alone(tiny):
    one, other, third = (adapted(tiny, seed, **ALL) for seed in (1, 1, 2))
    for name, parameter in one.trained_parameters().items():
        assert (parameter == other.trained_parameters()[name]).all()
        assert parameter.name == other.trained_parameters()[name].name
    pairs, others = lora_of(one).components["unet"], lora_of(third).components["unet"]
    assert all((pairs[name].down != others[name].down).any() and not pairs[name].up.any() for name in pairs)
    downs = np.concatenate([pair.down.ravel() for pair in pairs.values()])
    assert downs.std() == pytest.approx(1 / 3, rel=0.05) and all(pair.rank == 3 for pair in pairs.values())


def test_rows_of_tokens(tiny):
    model, plain = adapted(tiny, **ALL), base(tiny)
    table = plain.text_encoder.model.embed_tokens.weight.numpy()
    ids, rows = tokens_of(model)
    rows = dict(zip(ids, rows, strict=True))
    assert list(rows) == ["<fido>", "[x]", "cat"]
    np.testing.assert_allclose(rows["<fido>"], table[[5, 6, 8]].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(rows["[x]"], table[: len(WORDS)].mean(axis=0), atol=1e-6)
    assert (rows["cat"] == table[7]).all()
    disturb(model)
    found = model.text_encoder.model.embed_tokens(paddle.arange(102)).numpy()
    for number in range(102):
        if number in (7, 100, 101):
            assert (found[number] == tokens_of(model)[1][[100, 101, 7].index(number)]).all()
        else:
            assert (found[number] == table[number]).all()
    assert model.tokenizer.encode(["a cat <fido> of[x]"])[0, 1:7].tolist() == [1, 7, 100, 1, 101, 3]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"lora_rank": 2, "lora_components": ["net"]}, "net: the model has vae, text_encoder, unet"),
        ({"lora_rank": 2, "lora_components": ["vae"]}, "no linear or convolution layer of vae"),
        ({"lora_rank": 2, "lora_modules": ["atn"]}, "atn: no linear or convolution layer of unet .* such as conv_in"),
        ({"train_tokens": ["<fido>=^horse"]}, "nothing in the vocabulary matches .horse"),
        ({"train_tokens": ["horse"]}, "nothing in the vocabulary matches horse"),
        ({"train_tokens": ["[MASK]=dog"]}, r"\[MASK\] is in the vocabulary"),
    ],
)
def test_what_cannot_be_adapted_is_refused(tiny, asked, words):
    with pytest.raises(ConfigError, match=words):
        adapted(tiny, **asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"train_tokens": ["<fido>=("]}, "is not a regular expression"),
        ({"train_tokens": ["*"]}, "is not a regular expression"),
        ({"train_tokens": ["<a>=x", "<a>=y"]}, "names <a> twice"),
    ],
)
def test_settings_that_cannot_work(asked, words):
    with pytest.raises(ConfigError, match=words):
        LdmConfig(**asked).check()


@pytest.mark.turn("a family learns eight pictures", 1)
@pytest.mark.slow
@pytest.mark.parametrize("asked", [{**ALL, "lora_modules": ["attn", "conv"]}, {"lora_rank": 4}])
def test_eight_pictures_are_learned(tiny, asked):
    """What a base that knows nothing of them lacks, its adapters learn."""
    model, batch = adapted(tiny, **asked), make_batch(8)
    model.train()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=[*model.trained_parameters().values()], weight_decay=0.0)
    losses = []
    for _ in range(120):
        loss = model(**batch).value
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert losses[-1] < (0.25 if "train_tokens" in asked else 0.8) * losses[0]
