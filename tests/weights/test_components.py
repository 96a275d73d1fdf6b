import numpy as np
from small_weights import small_weights

from ppldm.weights.components import ComponentWeights, encoder_digest, text_encoder_digest
from ppldm.weights.fill import component_of, fill_component
from ppldm.weights.source import read_component


def changed(vae, config=None, **arrays):
    return ComponentWeights({**vae.config, **(config or {})}, {**vae.arrays, **arrays})


def test_the_digest_of_an_encoder_is_of_all_that_encoding_depends_on(tiny):
    vae = read_component("vae", tiny.vae)
    digest = encoder_digest(vae)
    assert digest == encoder_digest(component_of("vae", fill_component("vae", vae)))
    for config in ({"norm_num_groups": 1}, {"act_fn": "gelu"}, {"layers_per_block": 9}, {"use_quant_conv": False}):
        assert encoder_digest(changed(vae, config)) != digest
    for name, array in vae.arrays.items():
        other = array.copy()
        other.flat[-1] = np.nextafter(other.flat[-1], np.float32(np.inf))
        encodes = not name.startswith(("decoder.", "post_quant_conv."))
        assert (encoder_digest(changed(vae, **{name: other})) != digest) == encodes, name
    assert encoder_digest(changed(vae, {"scaling_factor": 1.0})) == digest


def test_the_digest_of_a_text_encoder_is_of_all_that_its_hidden_states_depend_on():
    given = small_weights().components["text_encoder"]
    digest = text_encoder_digest(given)
    for config in ({"encoder_attention_heads": 4}, {"activation_function": "relu"}, {"pad_token_id": 3}):
        assert text_encoder_digest(changed(given, config)) != digest
    for name, array in [*given.arrays.items()][::-4]:
        other = array.copy()
        other.flat[-1] = np.nextafter(other.flat[-1], np.float32(np.inf))
        counts = not name.startswith("to_logits.")
        assert (text_encoder_digest(changed(given, **{name: other})) != digest) == counts, name
    assert text_encoder_digest(changed(given, {"dropout": 0.5, "init_std": 1.0})) == digest
