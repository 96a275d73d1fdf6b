import numpy as np

from ppldm.weights.components import ComponentWeights, encoder_digest
from ppldm.weights.fill import component_of, fill_component, find_component_by_name


def changed(vae, config=None, **arrays):
    return ComponentWeights({**vae.config, **(config or {})}, {**vae.arrays, **arrays})


def test_the_digest_of_an_encoder_is_of_all_that_encoding_depends_on(tiny):
    vae = find_component_by_name("vae", tiny.vae)
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
