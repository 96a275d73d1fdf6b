import needs
import numpy as np

from ppldm.inference.precompute.picture_encoder import load_encoder


def test_what_is_computed_of_a_row_does_not_depend_on_the_others(tiny, monkeypatch):
    encoder = load_encoder(tiny.vae, 4, offline=True)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    together = encoder(pixels)
    assert together.shape == (4, 2, encoder.channels, 32 // encoder.factor, 32 // encoder.factor)
    for count in (1, 3):
        assert (encoder(pixels[:count]) == together[:count]).all()
    sizes, inner = [], encoder._vae.encode
    monkeypatch.setattr(encoder._vae, "encode", lambda batch: (sizes.append(batch.shape[0]), inner(batch))[1])
    encoder(pixels[:1])
    assert sizes == [4]


def test_an_engine_encodes_what_paddle_encodes(tiny):
    needs.need("engine")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    eager, other = (load_encoder(tiny.vae, 4, True, engine)(pixels) for engine in ("eager", "openvino"))
    assert eager.std() > 0.1 and 0 < np.abs(eager - other).max() <= 1e-4
