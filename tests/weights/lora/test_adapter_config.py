"""What a LoRA file says of its scale, in whatever place, is how its pairs are applied, or refused by name."""

import json

import needs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ppldm.cli.main import run
from ppldm.utils.errors import ModelError
from ppldm.weights.lora.files import LORA_FILE, read_key, read_lora, write_lora

Q, K, TEXT = "down_blocks.0.attentions.0.to_q", "down_blocks.0.attentions.0.to_k", "text_model.encoder.layers.0.mlp.fc1"
LAYERS = {"unet": [Q, K], "text_encoder": [TEXT]}


def arrays_of(layers=LAYERS, rank=4, start="{component}.", down=".lora_A.weight", up=".lora_B.weight"):
    rng, found = np.random.default_rng(0), {}
    for component, names in layers.items():
        for name in names:
            own = rank if isinstance(rank, int) else rank[name]
            key = start.format(component=component) + name
            found[key + down] = rng.standard_normal((own, 8), "f4")
            found[key + up] = rng.standard_normal((8, own), "f4")
    return found


def write(folder, settings: dict, place: str, component: str = "unet", **arrays):
    """A file that says these settings in one of the places that programs use."""
    arrays = arrays_of({component: LAYERS[component]}, **arrays)
    if place == "header":
        said = {f"{component}.{name}": value for name, value in settings.items()}
        path = folder / "a.safetensors"
        save_file(arrays, path, {"lora_adapter_metadata": json.dumps(said), "format": "pt"})
        return path
    arrays = {key.replace(f"{component}.", "base_model.model.", 1): array for key, array in arrays.items()}
    save_file(arrays, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    return folder / "adapter_model.safetensors" if place == "beside" else folder


PLACES = ["header", "beside", "folder"]
SAID = [
    ({"lora_alpha": 8, "r": 4}, {Q: 2, K: 2, TEXT: 2}),
    ({"lora_alpha": 16.0}, {Q: 4, K: 4, TEXT: 4}),
    ({"lora_alpha": 16, "use_rslora": True, "use_dora": False}, {Q: 8, K: 8, TEXT: 8}),
    ({"lora_alpha": 4, "alpha_pattern": {"to_q": 2, "mlp.fc1": 6}}, {Q: 0.5, K: 1, TEXT: 1.5}),
    ({"lora_alpha": 4, "alpha_pattern": {Q: 2, TEXT: 6}}, {Q: 0.5, K: 1, TEXT: 1.5}),
    ({"lora_alpha": 4, "alpha_pattern": {".*to_q": 2, "^text_model.*fc1": 6}}, {Q: 0.5, K: 1, TEXT: 1.5}),
    ({"lora_alpha": 4, "alpha_pattern": {"o_q": 2, "attentions.0": 3, "fc": 6}}, {Q: 1, K: 1, TEXT: 1}),
    ({"lora_alpha": 0}, {Q: 0, K: 0, TEXT: 0}),
]


@pytest.mark.parametrize("component", LAYERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("said, scales", SAID)
def test_the_scale_is_what_the_file_says(tmp_path, component, place, said, scales):
    lora = read_lora(write(tmp_path, said, place, component))
    assert {name: pair.alpha / pair.rank for name, pair in lora.components[component].items()} == {
        name: scales[name] for name in LAYERS[component]
    }


def test_ranks_of_a_pattern(tmp_path):
    said = {"lora_alpha": 8, "r": 4, "rank_pattern": {"to_k": 2}, "use_rslora": True}
    path = write(tmp_path, said, "header", rank={Q: 4, K: 2})
    pairs = read_lora(path).components["unet"]
    assert pairs[Q].alpha / 4 == 4.0 and pairs[K].alpha / 2 == pytest.approx(8 / 2**0.5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("said", [one for one, _ in SAID])
@pytest.mark.parametrize("form", ["diffusers", "kohya"])
def test_in_another_form_it_is_the_same_change(tmp_path, place, said, form, capsys):
    source = write(tmp_path, said, place)
    run(["lora", "convert", str(source), "--to", form, "--out", str(tmp_path / "other.safetensors")])
    before, after = (read_lora(path).components["unet"] for path in (source, tmp_path / "other.safetensors"))
    for name, pair in before.items():
        np.testing.assert_allclose(after[name].change, pair.change, rtol=1e-5, atol=1e-6)
    if form == "diffusers":  # older loaders know no header
        assert all(pair.alpha == pair.rank for pair in after.values())
    run(["lora", "show", str(source), "--json"])
    shown = json.loads(capsys.readouterr().out)["components"]["unet"]["alphas"]
    assert shown == sorted({pair.alpha for pair in before.values()})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "said, words",
    [
        ({"lora_alpha": 4, "use_dora": True}, "use_dora True is not supported"),
        ({"lora_alpha": 4, "lora_bias": True}, "lora_bias"),
        ({"lora_alpha": 4, "bias": "all"}, "bias 'all'"),
        ({"lora_alpha": 4, "init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"lora_alpha": 4, "layer_replication": [[0, 2]]}, "layer_replication"),
        ({"lora_alpha": 4, "fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_alpha": 4, "a_setting_of_tomorrow": {"x": 1}}, "a_setting_of_tomorrow"),
        ({"lora_alpha": 4, "r": 8}, "has rank 4, and the file says 8"),
        ({"lora_alpha": 4, "rank_pattern": {"to_q": 2}}, "has rank 4, and the file says 2"),
        ({"r": 4}, "without lora_alpha"),
        ({"lora_alpha": "8"}, "lora_alpha '8' is not a number"),
        ({"lora_alpha": None}, "lora_alpha None is not a number"),
        ({"lora_alpha": True}, "is not a number"),
        ({"lora_alpha": 4, "use_rslora": "yes"}, "use_rslora 'yes'"),
        ({"lora_alpha": 4, "alpha_pattern": [1]}, "alpha_pattern"),
        ({"lora_alpha": 4, "alpha_pattern": {"to_q": "2"}}, "alpha_pattern"),
        ({"lora_alpha": 4, "alpha_pattern": {"(a+)+b": 2}}, "no name of a layer"),
        ({"lora_alpha": 4, "alpha_pattern": {".*.*.*.*.*x": 2}}, "no name of a layer"),
        ({"lora_alpha": 4, "alpha_pattern": {"**": 2}}, "no name of a layer"),
        ({"lora_alpha": 4, "alpha_pattern": {f"{one}.*": 2 for one in range(99)}}, "no name of a layer"),
        ({"lora_alpha": 4, "alpha_pattern": {f"a{one}": 2 for one in range(9999)}}, "no name of a layer"),
        ({"lora_alpha": 4, "peft_type": "LOHA"}, "peft_type 'LOHA'"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(tmp_path, place, said, words):
    with pytest.raises(ModelError, match=words) as caught:
        read_lora(write(tmp_path, said, place))
    assert str(tmp_path) in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=4,
)
NAMES = ["lora_alpha", "r", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora", "bias", "init_lora_weights", "x"]


@hypothesis_settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_whatever_a_header_holds_is_read_or_refused(tmp_path_factory, said):
    path = write(tmp_path_factory.mktemp("any"), said, "header")
    try:
        pairs = read_lora(path).components["unet"].values()
    except ModelError:
        return
    assert all(np.isfinite(pair.change).all() for pair in pairs)
    assert not said or "lora_alpha" in said


def test_many_patterns_of_many_layers_take_no_time(tmp_path):
    """A pattern a layer, as diffusers writes them; a regular expression each took a minute."""
    layers = [f"down_blocks.{one}.attentions.0.transformer_blocks.0.attn1.to_q" for one in range(800)]
    said = {"unet.lora_alpha": 4, "unet.alpha_pattern": {layer: number for number, layer in enumerate(layers)}}
    save_file(arrays_of({"unet": layers}), tmp_path / "a.safetensors", {"lora_adapter_metadata": json.dumps(said)})
    pairs = read_lora(tmp_path / "a.safetensors").components["unet"]
    assert [pairs[layer].alpha for layer in layers] == [*range(800)]


@pytest.mark.parametrize("header", ["{", "[]", "7", "[" * 100_000])
def test_a_header_that_is_no_object(tmp_path, header):
    save_file(arrays_of(), tmp_path / "a.safetensors", {"lora_adapter_metadata": header})
    with pytest.raises(ModelError, match="lora_adapter_metadata of its header"):
        read_lora(tmp_path / "a.safetensors")


def test_two_statements_must_agree(tmp_path):
    path = write(tmp_path, {"lora_alpha": 8}, "header")
    arrays, alpha = load_file(path), {f"unet.{name}.alpha": np.full(1, 8, "f4") for name in (Q, K)}
    header = {"lora_adapter_metadata": json.dumps({"unet.lora_alpha": 8})}
    save_file({**arrays, **alpha}, path, header)
    assert read_lora(path).components["unet"][Q].alpha == 8
    save_file({**arrays, **alpha, f"unet.{Q}.alpha": np.full(1, 4, "f4")}, path, header)
    with pytest.raises(ModelError, match="has alpha 4, and its settings say 8"):
        read_lora(path)


@pytest.mark.parametrize("form, name", [("kohya", "ss_network_alpha"), ("diffusers", "lora_alpha")])
def test_a_scale_of_the_whole_file_beside_pairs_without_one(tmp_path, form, name):
    arrays = arrays_of()
    if form == "kohya":
        layers = {"unet": [Q.replace(".", "_")], "text_encoder": [TEXT.replace(".", "_")]}
        starts = {"unet": "lora_unet_", "text_encoder": "lora_te_"}
        arrays = {}
        for component, names in layers.items():
            arrays |= arrays_of({component: names}, 4, starts[component], ".lora_down.weight", ".lora_up.weight")
    path = tmp_path / "a.safetensors"
    for said in ("4", "4.0", "Dynamic"):
        save_file(arrays, path, {name: said})
        assert read_lora(path).components["unet"][Q].alpha == 4
    save_file(arrays, path, {name: "1.0"})
    with pytest.raises(ModelError, match=f"the header says {name} 1: whether it is scaled"):
        read_lora(path)
    write_lora(read_lora_of(arrays, tmp_path, {name: "4"}), tmp_path / "out.safetensors")
    assert read_lora(tmp_path / "out.safetensors").metadata.keys() == set()


def read_lora_of(arrays, folder, header):
    save_file(arrays, folder / "of.safetensors", header)
    return read_lora(folder / "of.safetensors")


@pytest.mark.parametrize(
    "key, layer",
    [
        (f"base_model.model.{Q}.lora_A.weight", ("unet", Q)),
        (f"base_model.model.{Q}.lora_A.default.weight", ("unet", Q)),
        (f"unet.base_model.model.{Q}.lora_A.my-style.weight", ("unet", Q)),
        ("base_model.model.conv_in.lora_A.weight", ("unet", "conv_in")),
        ("base_model.model.time_embedding.linear_1.lora_A.weight", ("unet", "time_embedding.linear_1")),
        (f"base_model.model.{TEXT}.lora_A.default_0.weight", ("text_encoder", TEXT)),
        ("base_model.model.transformer_blocks.3.ff.lora_A.weight", ("transformer", "transformer_blocks.3.ff")),
        (f"unet.{Q}.lora_A.my_adapter.weight", ("unet", Q)),
        (f"diffusion_model.{Q}.lora_A.weight", ("unet", Q)),
        (f"diffusion_model.{Q}.lora_down.weight", ("unet", Q)),
        ("diffusion_model.input_blocks.1.1.proj_in.lora_down.weight", ("unet", "down_blocks.0.attentions.0.proj_in")),
        ("model.diffusion_model.input_blocks.1.1.proj_in.lora_A.weight", ("unet", Q.replace("to_q", "proj_in"))),
        (f"text_encoders.clip_l.transformer.{TEXT}.lora_A.weight", ("text_encoder", TEXT)),
        (f"clip_l.transformer.{TEXT}.lora_down.weight", ("text_encoder", TEXT)),
        (f"text_encoders.clip_h.transformer.{TEXT}.lora_A.weight", ("text_encoder", TEXT)),
    ],
)  # fmt: skip
def test_keys_of_peft_and_comfyui(key, layer):
    assert read_key(key) == (*layer, "down")
    if ".lora_down" in key or ".lora_A.weight" in key:
        assert read_key(key.partition(".lora_")[0] + ".alpha") == (*layer, "alpha")


def test_adapters_of_two_names_are_not_mixed(tmp_path):
    arrays = arrays_of({"unet": [Q]}, down=".lora_A.one.weight", up=".lora_B.one.weight")
    save_file(arrays, tmp_path / "a.safetensors")
    assert read_lora(tmp_path / "a.safetensors").components["unet"].keys() == {Q}
    arrays |= arrays_of({"unet": [K]}, down=".lora_A.two.weight", up=".lora_B.two.weight")
    save_file(arrays, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"several adapters \(one, two\)"):
        read_lora(tmp_path / "a.safetensors")


def test_a_dora_is_named(tmp_path):
    for key in (f"unet.{Q}.lora_magnitude_vector", "lora_unet_mid_block_attentions_0_proj_in.dora_scale"):
        save_file({**arrays_of(), key: np.ones(8, "f4")}, tmp_path / "a.safetensors")
        with pytest.raises(ModelError, match=f"is a DoRA .{key}"):
            read_lora(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "own",
    [{"r": 4, "lora_alpha": 16}, {"r": 4, "lora_alpha": 16, "use_rslora": True},
     {"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q": 2}, "rank_pattern": {"to_q": 2}}],
)  # fmt: skip
def test_the_change_is_that_of_peft(tmp_path, own):
    needs.need("parity")
    import peft
    import torch

    torch.manual_seed(0)
    block = torch.nn.ModuleDict({"to_q": torch.nn.Linear(8, 8), "to_k": torch.nn.Linear(8, 8)})
    network = torch.nn.ModuleDict({"down_blocks": torch.nn.ModuleList([block])})
    network.forward = lambda x: x
    config = peft.LoraConfig(target_modules=["to_q", "to_k"], init_lora_weights=False, **own)
    model = peft.get_peft_model(network, config)
    model.save_pretrained(tmp_path)
    pairs = read_lora(tmp_path).components["unet"]
    modules = dict(model.named_modules())
    for name, pair in pairs.items():
        delta = modules[f"base_model.model.{name}"].get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(pair.change, delta, rtol=1e-5, atol=1e-6)
    assert len(pairs) == 2 and not (tmp_path / LORA_FILE).exists()
