"""A config that no network can have is refused by its name, setting and value, before paddle is imported."""

import inspect
import json
import re
import subprocess
import sys
from pkgutil import resolve_name

import pytest

from ppldm.config.network_files import CONFIG_DIR
from ppldm.networks import config_fields
from ppldm.networks.config_fields import CLASSES, REQUIRED, describe, fits, ignored_by, rule_of, settings_of
from ppldm.networks.configs import check_config, check_fit, check_tokenizer_fit, is_ldmbert, read_new_config, table_of
from ppldm.utils.errors import ConfigError, EnvironmentProblem, ModelError
from tests.conftest import (
    DIT_CONFIG,
    MICRODIT_CONFIG,
    SINGLE_STREAM_CONFIG,
    TEXT_ENCODER_CONFIG,
    UNET_CONFIG,
    UVIT_CONFIG,
    VAE_CONFIG,
)

CLIP = {"vocab_size": 520, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONTROLNET = {name: UNET_CONFIG[name] for name in UNET_CONFIG if name in settings_of("controlnet")} | {
    "conditioning_channels": 4,
}
CASCADE_CONTROLNET = {
    "conditioning_channels": 3, "projection_channels": 2048, "blocks": [0, 4], "bottleneck": "effnet",
}  # fmt: skip
PUBLISHED = {"cascade_prior": "cascade_c_1b", "cascade_decoder": "cascade_b_700m", "effnet": "effnet_v2_s",
             "vqgan": "vqgan_f4", "image_encoder": "image_encoder_vit_l", "t5": "t5_tiny",
             "sd3": "sd3_tiny"}  # fmt: skip
CONFIGS = {"vae": VAE_CONFIG, "unet": UNET_CONFIG, "controlnet": CONTROLNET, "ldmbert": TEXT_ENCODER_CONFIG,
           "clip": CLIP, "uvit": UVIT_CONFIG, "dit": DIT_CONFIG, "microdit": MICRODIT_CONFIG,
           "single_stream": SINGLE_STREAM_CONFIG, "cascade_controlnet": CASCADE_CONTROLNET,
           "pixels": {"colour_space": "rgb"}} | {
    kind: json.loads((CONFIG_DIR / f"{name}.json").read_text()) for kind, name in PUBLISHED.items()
}  # fmt: skip
# How many settings a model.json has of each, which is refused where one of them is missing: an older one then, too.
COUNTS = {
    "unet": 49, "controlnet": 32, "uvit": 17, "dit": 24, "microdit": 15, "vae": 19, "ldmbert": 15, "clip": 12, "t5": 13,
    "cascade_prior": 23, "cascade_decoder": 23, "effnet": 3, "vqgan": 9, "image_encoder": 10, "cascade_controlnet": 8,
    "single_stream": 11, "pixels": 9,
    "sd3": 11,
}  # fmt: skip
NEVER = ["x", {}, [], [[]], "", float("nan"), -1.5]  # values that no setting can have, but for those that are names
NUMBERS = {"freq_shift", "qk_scale"}  # which the class does not say


def parameters_of(table):
    """Of the class itself, which is imported, by name."""
    parameters = inspect.signature(resolve_name(CLASSES[table]).__init__).parameters
    return {name: one for name, one in parameters.items() if one.default is not one.empty}


def defaults_of(table):
    """What is meant where a config says nothing, as JSON has it."""
    return json.loads(json.dumps({name: setting.default for name, setting in settings_of(table).items()}))


@pytest.mark.parametrize("table", CLASSES)
def test_settings_are_those_of_the_class(table):
    own = {name: one.default for name, one in parameters_of(table).items()}
    found = {name: setting.default for name, setting in settings_of(table).items()}
    unused = own.keys() - found.keys()
    assert {**found, **{name: own[name] for name in unused}} == own and len(found) == COUNTS[table]
    assert unused == config_fields._UNUSED.get(table, set())
    assert unused <= ignored_by(table) and not ignored_by(table) & found.keys()
    assert set(REQUIRED[table].split()) <= found.keys() and REQUIRED.keys() == CLASSES.keys()


@pytest.mark.parametrize("table", CLASSES)
def test_defaults_are_allowed_and_a_config_is_completed(table):
    defaults = defaults_of(table)
    assert all(fits(value, rule_of(table, name)) for name, value in defaults.items())
    whole = check_config(table, CONFIGS[table], "x")
    assert whole == defaults | CONFIGS[table] and list(whole) == list(defaults)
    assert check_config(table, whole, "x", new=True) == whole
    named = {"_class_name": "Anything", "_ppdiffusers_version": "0.0.0", "_name_or_path": 3, **CONFIGS[table]}
    assert check_config(table, named, "x", new=True) == whole


def test_what_is_returned_can_be_changed():
    check_config("vae", VAE_CONFIG, "x")["down_block_types"].append("more")
    check_config("vae", {"latent_channels": 3}, "x")["block_out_channels"].append(1)
    assert settings_of("vae")["block_out_channels"].default == (64,) and len(VAE_CONFIG["down_block_types"]) == 4


@pytest.mark.parametrize("table", ["ldmbert", "clip", "image_encoder", "t5"])
def test_what_paddlenlp_writes_beside_the_settings_is_left_out(table):
    written = resolve_name(CLASSES[table])().to_dict()
    assert {"return_dict", "paddlenlp_version", "max_length", "recompute"} <= written.keys() - settings_of(table).keys()
    assert check_config(table, written | CONFIGS[table], "x", new=True) == defaults_of(table) | CONFIGS[table]


@pytest.mark.parametrize("table", CLASSES)
def test_every_setting_refuses_what_it_cannot_be(table):
    for name in settings_of(table):
        allowed = [value for value in NEVER if fits(value, rule_of(table, name))]
        assert allowed in ([], [-1.5]), allowed  # a number of any size
        for value in NEVER:
            if value not in allowed:
                with pytest.raises(ModelError, match=rf"^file: {name} .* must be .*; correct it$"):
                    check_config(table, CONFIGS[table] | {name: value}, "file")


@pytest.mark.parametrize("table", CLASSES)
def test_every_setting_is_of_the_type_that_its_class_says(table):
    for name in settings_of(table):
        parameter, rule = parameters_of(table)[name], rule_of(table, name)
        said = f"{parameter.annotation} {parameter.default!r}"
        probes = (True, False, 1, 0.5, 2.0, 10**9)
        true, false, one, *numbers = (fits(value, rule) or fits([value], rule) for value in probes)
        assert true <= false == bool(re.search("bool|True|False", said)) and not (false and one), name
        assert not any(numbers) or re.search(r"float|\d[.e]", said) or name in NUMBERS, name


@pytest.mark.parametrize(
    "table, name, words",
    [
        (
            "unet",
            "layers_per_block",
            "a whole number from 1 to 1024 or a list of values, each a whole number from .*1024",
        ),
        ("unet", "mid_block_only_cross_attention", "true or false or null"),
        ("unet", "resnet_out_scale_factor", "a number above 0"),
        ("vae", "down_block_out_channels", "a list of values, each a whole number from 1 to 1048576 or null"),
        ("vae", "force_upcast", "true or false"),
        (
            "controlnet",
            "conditioning_embedding_out_channels",
            "a list of values, each a whole number from 1 to 1048576",
        ),
        ("cascade_prior", "dropout", "a number from 0 to below 1 or a list of values, each a number from 0 to below 1"),
        ("cascade_prior", "switch_level", "a list of values, each true or false or null"),
        ("cascade_controlnet", "large_channels", "a list of 3 values, each a whole number from 1 to 1048576"),
        ("image_encoder", "layer_norm_eps", "a number above 0"),
    ],
)
def test_defaults_and_annotations_say_what_may_be(table, name, words):
    assert re.fullmatch(words, describe(rule_of(table, name)))


@pytest.mark.parametrize(
    "source",
    [
        "",
        "    pass\nclass B(A):\n    def __init__(x=1):",
        *(f"    def __init__({x}):" for x in ("x=,", "x=y", "self, *, x=1")),
    ],
)
def test_settings_that_cannot_be_read_are_a_problem_of_the_installation(monkeypatch, source):
    monkeypatch.setitem(CLASSES, "vqgan", "there_is_none.VQ")
    for read in (config_fields._source_of, lambda module: f"\nclass VQ(A):\n{source}\n"):
        monkeypatch.setattr(config_fields, "_source_of", read)
        with pytest.raises(
            EnvironmentProblem, match=r"^the settings of there_is_none\S* cannot be read .*; `ppldm env`"
        ):
            settings_of.__wrapped__("vqgan")


WRONG = [
    ("ldmbert", {"encoder_attention_heads": 0}, "encoder_attention_heads 0 must be a whole number from 1"),
    ("ldmbert", {"encoder_layers": -1}, "encoder_layers -1 must be"),
    ("ldmbert", {"dropout": 1.5}, "dropout 1.5 must be a number from 0 to below 1"),
    ("ldmbert", {"dropout": 1}, "dropout 1 must be a number from 0 to below 1"),
    ("ldmbert", {"activation_function": "gleu"}, 'activation_function "gleu" must be one of gelu, .*tanh'),
    ("ldmbert", {"pad_token_id": 100}, "pad_token_id 100 must be below vocab_size 100"),
    ("ldmbert", {"encoder_layer": 3}, "no setting 'encoder_layer' .* an LDMBert.*; did you mean encoder_layers?"),
    ("ldmbert", {"d_model": None}, "d_model null must be"),
    ("clip", {"num_attention_heads": 5}, "num_attention_heads 5 does not divide hidden_size 32"),
    ("unet", {"norm_num_groups": 3}, r"norm_num_groups 3 does not divide all of block_out_channels \[16, 16\]"),
    ("unet", {"attention_head_dim": 5}, "attention_head_dim 5 does not divide block_out_channels 16"),
    ("unet", {"attention_head_dim": [2, 3]}, "attention_head_dim 3 does not divide block_out_channels 16"),
    ("unet", {"attention_head_dim": [2]}, "attention_head_dim has 1 entries, and down_block_types 2"),
    ("unet", {"up_block_types": ["UpBlock2D"]}, "up_block_types has 1 entries, and down_block_types 2"),
    ("unet", {"block_out_channels": [16, 16, 16]}, "block_out_channels has 3 entries"),
    ("unet", {"block_out_channels": [16, 0]}, r"block_out_channels \[16, 0\] must be .* each a whole number from 1 to"),
    ("unet", {"down_block_types": ["DownBlok2D"] * 2}, "down_block_types .* must be .* each one of DownBlock2D, "),
    ("unet", {"freq_shift": 8}, "freq_shift 8 must be below half of the first of block_out_channels 16"),
    ("unet", {"class_embed_type": "projection"}, "class_embed_type projection needs projection_class_embeddings_input"),
    ("unet", {"encoder_hid_dim_type": "text_proj"}, "encoder_hid_dim_type text_proj needs encoder_hid_dim"),
    (
        "unet",
        {"addition_embed_type": "text"},
        "addition_embed_type_num_heads 64 does not divide cross",
    ),
    ("unet", {"num_attention_heads": 2}, r"num_attention_heads 2 must be null \(ppdiffusers"),
    ("unet", {"conv_in_kernel": 2}, "conv_in_kernel 2 must be an odd whole number"),
    ("unet", {"chanels": 3}, "no setting 'chanels' is known for a UNet; did you mean in_channels"),
    ("uvit", {"num_layers": 3}, "num_layers 3 must be even"),
    ("uvit", {"patch_size": 3}, "patch_size 3 does not divide sample_size 4"),
    ("uvit", {"out_channels": 8}, "out_channels 8 must be in_channels 4"),
    ("dit", {"out_channels": 5}, "out_channels 5 must be in_channels 4, or twice as many"),
    ("dit", {"cross_attention_dim": 16}, "cross_attention_dim 16 must be heads times their width, 32"),
    ("dit", {"norm_type": "layer_norm"}, "norm_type layer_norm must be ada_norm_single with caption_channels"),
    ("dit", {"caption_channels": None}, "norm_type ada_norm_single must be ada_norm_single with caption_channels"),
    ("dit", {"attention_head_dim": 15, "cross_attention_dim": 30}, "num_attention_heads times .*, 30, must be a mul"),
    ("dit", {"sample_size": 128}, "sample_size 128 makes a DiT that is told sizes"),
    ("microdit", {"patch_size": 3}, "patch_size 3 does not divide sample_size 4"),
    ("microdit", {"patch_mixer_dim": 20}, "head_dim 8 does not divide patch_mixer_dim 20"),
    ("sd3", {"caption_projection_dim": 64}, "caption_projection_dim 64 must be heads times their width, 128"),
    ("sd3", {"out_channels": 8}, "out_channels 8 must be in_channels 4, or null"),
    ("microdit", {"dim": 30, "head_dim": 2}, "dim 30 must be a multiple of 4"),
    ("single_stream", {"dim": 30, "head_dim": 6}, "head_dim 6 must be a multiple of 4"),
    ("single_stream", {"head_dim": 12}, "head_dim 12 does not divide dim 32"),
    ("microdit", {"mlp_ratio": [1, 2, 3]}, r"mlp_ratio \[1, 2, 3\] must be a list of 2 values, each a number above 0"),
    ("dit", {"num_embeds_ada_norm": None}, "num_embeds_ada_norm null must be a number"),
    ("vae", {"norm_num_groups": None}, "norm_num_groups null must be"),
    ("vae", {"up_block_out_channels": [8, 8, 8, 6]}, "norm_num_groups 4 does not divide all of up_block_out_channels"),
    ("vae", {"scaling_factor": 0}, "scaling_factor 0 must be a number above 0"),
    ("vae", {"latents_std": [1, 1, 1, 0]}, r"latents_std \[1, 1, 1, 0\] must be a list of values, each a number above"),
    ("vae", {"latents_mean": [0] * 3, "latents_std": [1] * 4}, "latents_mean has 3 entries, and latent_channels is 4"),
    ("vae", {"latents_mean": [0] * 4, "latents_std": [1] * 5}, "latents_std has 5 entries, and latent_channels is 4"),
    ("vae", {"latents_std": [1] * 4}, "latents_mean and latents_std must be there together, without a shift_factor"),
    ("vae", {"latents_mean": [0] * 4, "latents_std": [1] * 4, "shift_factor": 0.1}, "latents_mean .* without a shift"),
    ("cascade_prior", {"num_attention_heads": [24, 7]}, "num_attention_heads 7 does not divide block_out_channels 15"),
    ("cascade_prior", {"num_attention_heads": [-1, 24]}, "num_attention_heads -1 does not divide"),
    ("cascade_prior", {"dropout": [0.1]}, "dropout has 1 entries, and block_out_channels 2"),
    ("cascade_prior", {"switch_level": [True, True]}, "switch_level has 2 entries, and there are 1 steps"),
    (
        "cascade_prior",
        {"block_types_per_layer": [["ResBlock"]] * 2},
        "block_types_per_layer .* each one of SDCascadeRes",
    ),
    ("cascade_prior", {"effnet_in_channels": 16}, "effnet_in_channels 16 is for a decoder"),
    ("cascade_prior", {"clip_image_in_channels": None}, "clip_image_in_channels null: a prior attends to captions"),
    ("cascade_prior", {"out_channels": 8}, "in_channels 16 and out_channels 8 differ"),
    ("cascade_decoder", {"effnet_in_channels": None}, "effnet_in_channels null: a decoder is told the latents"),
    ("effnet", {"stage_layers": [2, 4]}, "stage_channels has 8 entries and stage_layers 2; there are 6 stages"),
    ("cascade_controlnet", {"blocks": [4, 0]}, "blocks .4, 0. must be an ascending list of whole numbers from 0"),
    (
        "cascade_controlnet",
        {"large_channels": [4, 8]},
        "large_channels .4, 8. must be a list of 3 values, each a whole",
    ),
    ("vqgan", {"embed_dim": 33}, "embed_dim 33 cannot be halved for each of levels 2"),
    ("vae", {"qqqq": 1}, "no setting 'qqqq' is known for a VAE; known: in_channels"),
]


@pytest.mark.parametrize("table, change, words", WRONG)
@pytest.mark.parametrize("new", [False, True])
def test_wrong_values_are_named(table, change, words, new):
    with pytest.raises(ModelError, match=f"^file: {words}"):
        check_config(table, CONFIGS[table] | change, "file", new=new)


def test_the_last_value_before_a_refused_one_is_taken():
    assert check_config("unet", CONFIGS["unet"] | {"freq_shift": 7}, "file")["freq_shift"] == 7


@pytest.mark.parametrize("table", CLASSES)
def test_a_new_network_names_its_sizes(table):
    for name in REQUIRED[table].split():
        rest = {key: value for key, value in CONFIGS[table].items() if key != name}
        with pytest.raises(ModelError, match=f"^file is not a config of an? .*: it does not say .*{name}"):
            check_config(table, rest, "file", new=True)
    for new in (False, True):
        with pytest.raises(ModelError, match="^file is not a config of"):
            check_config(table, {}, "file", new=new)


def test_an_unknown_setting_that_asks_for_nothing_is_another_version_s():
    assert "later_setting" not in check_config("unet", UNET_CONFIG | {"later_setting": None}, "x")
    with pytest.raises(ModelError, match="no setting 'later_setting'"):
        check_config("unet", UNET_CONFIG | {"later_setting": None}, "x", new=True)


@pytest.mark.parametrize("given", CONFIGS)
@pytest.mark.parametrize("wanted", ["vae", "unet", "ldmbert", "text_encoder", "transformer"])
def test_a_config_of_another_kind_is_recognised(given, wanted):
    kinds = {
        "vae": ("pixels",),
        "text_encoder": ("ldmbert", "clip", "t5"),
        "transformer": ("uvit", "dit", "microdit", "sd3", "single_stream"),
    }
    if given in (wanted, *kinds.get(wanted, ())):
        assert check_config(wanted, CONFIGS[given], "x")
        return
    with pytest.raises(ConfigError, match=r"^file is the config of an? .*, and an? .* is wanted here"):
        check_config(wanted, CONFIGS[given], "file", ConfigError)


def test_two_kinds_of_text_encoder():
    assert table_of("text_encoder", CLIP) == "clip" and not is_ldmbert(CLIP) and is_ldmbert(TEXT_ENCODER_CONFIG)
    everything = defaults_of("ldmbert") | dict.fromkeys(ignored_by("ldmbert"), 1)
    assert check_config("text_encoder", everything, "x") == defaults_of("ldmbert")


FITTING = {kind: check_config(kind, CONFIGS[kind], "x") for kind in ("vae", "unet")} | {
    "text_encoder": check_config("ldmbert", TEXT_ENCODER_CONFIG, "x"),
    "transformer": check_config("transformer", UVIT_CONFIG, "x"),
}


@pytest.mark.parametrize(
    "kind, change, words",
    [
        ("vae", {"latent_channels": 8}, "the UNet takes 4 channels and gives 4, and the VAE gives 8"),
        ("unet", {"out_channels": 8}, "the UNet takes 4 channels and gives 8, and the VAE gives 4"),
        ("vae", {"in_channels": 1}, "the VAE takes 1 channels and gives 3; pictures have 3"),
        ("unet", {"cross_attention_dim": 16}, "the UNet attends to width 16 and the text encoder gives 32"),
        ("unet", {"cross_attention_dim": [32, 16]}, r"the UNet attends to width \[32, 16\] and the text encoder"),
        ("transformer", {"in_channels": 8}, "the vae gives latent_channels 4, and the transformer takes in_channels 8"),
        ("transformer", {"clip_dim": 16}, "the transformer attends to width 16 and the text encoder gives 32"),
        ("unet", {"num_class_embeds": 10}, "the UNet's num_class_embeds 10 asks for an input that"),
    ],
)
def test_networks_that_do_not_fit(kind, change, words):
    check_fit(FITTING)
    check_fit(FITTING | {"unet": FITTING["unet"] | {"cross_attention_dim": [32, 32]}})
    with pytest.raises(ModelError, match=f"^{words}"):
        check_fit(FITTING | {kind: FITTING[kind] | change})
    with pytest.raises(ConfigError, match=f"^file: {words}"):
        check_fit(FITTING | {kind: FITTING[kind] | change}, "file", ConfigError)


def test_a_unet_for_inpainting_is_drawn_with_and_not_trained():
    configs = FITTING | {"unet": FITTING["unet"] | {"in_channels": 9}}
    check_fit(configs, drawn=True)
    with pytest.raises(ModelError, match="^the UNet takes a mask: models for inpainting draw and are not trained"):
        check_fit(configs)
    for change in ({"in_channels": 8}, {"out_channels": 9}):
        with pytest.raises(ModelError, match="^the UNet takes [89] channels and gives [49], and the VAE gives 4"):
            check_fit(FITTING | {"unet": configs["unet"] | change}, drawn=True)


def test_tokenizers_that_do_not_fit():
    check_tokenizer_fit(FITTING["text_encoder"], 100, 12)
    for sizes in ((101, 12), (100, 13)):
        with pytest.raises(ModelError, match="the text encoder knows 100 words and 12 positions, the tokenizer"):
            check_tokenizer_fit(FITTING["text_encoder"], *sizes)


def test_files_are_named(tmp_path):
    path = tmp_path / "c.json"
    with pytest.raises(ConfigError, match=r"--unet_config_file .*c.json is not there; give the path of a JSON file"):
        read_new_config("unet", path, "--unet_config_file")
    for text, words in (("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "does not hold a JSON object")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"c.json {words}"):
            read_new_config("unet", path, "--unet_config_file")
    path.write_bytes(b"\xff{}")
    with pytest.raises(ConfigError, match="c.json is not JSON"):
        read_new_config("unet", path, "--unet_config_file")
    path.write_text(json.dumps(UNET_CONFIG))
    assert read_new_config("unet", path, "")["norm_eps"] == 1e-5


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.json")), ids=lambda path: path.name)
def test_published_configs_are_read(path):
    table = "ldmbert" if "bert" in path.name else path.name.partition("_")[0].partition(".")[0]
    table = {"image": "image_encoder", "single": "single_stream"}.get(table, table)
    if table == "cascade":
        table = {"c": "cascade_prior", "b": "cascade_decoder"}[path.name.split("_")[1]]
    assert json.loads(path.read_text()).items() <= read_new_config(table, path, "").items()


@pytest.mark.cold
def test_no_paddle_is_imported():
    code = """
import sys
from ppldm.networks.config_fields import CLASSES, ignored_by, settings_of
print(sum(len(settings_of(kind)) + len(ignored_by(kind)) for kind in CLASSES) > 259)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"paddle", "paddlenlp", "ppdiffusers", "numpy", "False"} & set(done.stdout.split())
