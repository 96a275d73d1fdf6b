"""Laws of `--mask_pad_tokens`: what is predicted does not depend on what stands behind a caption, nor on how far it is
padded; without it, it does."""

import numpy as np
import paddle
import pytest
from tiny_model import make_batch, make_model

from ppldm.diffusion.drawing import Drawing
from ppldm.diffusion.guided import sample_latents
from ppldm.networks.model import token_mask

END, PAD = 3, 0


@pytest.fixture(scope="module")
def model(tiny):
    """One whose every weight counts."""
    made = make_model(tiny)
    for parameter in made.unet.parameters():
        parameter.set_value(parameter + 0.01)
    made.eval()
    return made


@pytest.fixture(autouse=True)
def masked(model):
    model.mask_behind = END
    yield
    model.mask_behind = None


def caption(words: list[int], length: int, behind=PAD):
    ids = np.full((2, length), behind, np.int64)
    ids[:, : len(words) + 1] = [*words, END]
    return paddle.to_tensor(ids)


def predict(model, ids):
    batch = make_batch(2)
    with paddle.no_grad():
        return model.predict(batch["noise"], batch["timesteps"], ids).numpy()


def test_ones_up_to_the_first_end_of_each_caption(model):
    ids = paddle.to_tensor([[2, 7, END, 7, END, 0], [2, END, 0, 0, 0, 0], [2, 7, 7, 7, 7, END]])
    assert token_mask(ids, model.mask_behind).tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    model.mask_behind = None
    assert token_mask(ids, model.mask_behind) is None


@pytest.mark.parametrize("words", [[2], [2, 9, 8, 7]])
def test_the_prediction_does_not_depend_on_the_padding(model, words):
    plain = predict(model, caption(words, 12))
    np.testing.assert_array_equal(predict(model, caption(words, 12, behind=57)), plain)
    np.testing.assert_allclose(predict(model, caption(words, 6)), plain, atol=1e-5)
    model.mask_behind = None
    unmasked = predict(model, caption(words, 12))
    assert abs(predict(model, caption(words, 6)) - unmasked).max() > 1e-4 < abs(plain - unmasked).max()


def test_a_caption_without_padding_is_predicted_as_without_a_mask(model):
    ids = caption([2, *range(10, 20)], 12)
    masked = predict(model, ids)
    model.mask_behind = None
    np.testing.assert_allclose(predict(model, ids), masked, atol=1e-6)


def test_both_branches_of_guidance_ignore_padding(model):
    noise = make_batch(2)["noise"]

    def drawn(ids, empty):
        return sample_latents(model, model.condition(ids), model.condition(empty), noise, Drawing(3, 3.0)).numpy()

    short, long = (drawn(caption([2, 9, 8], length), caption([2], length)[:1]) for length in (5, 12))
    np.testing.assert_allclose(short, long, atol=1e-4)
    other = caption([2], 12, behind=57)[:1]
    np.testing.assert_array_equal(drawn(caption([2, 9, 8], 12), other), long)


def test_an_empty_caption_is_zeros_where_asked_for_and_no_other(model):
    ids = paddle.concat([caption([2], 12)[:1], caption([2, 9, 8], 12)[:1]])
    hidden = model.encode_text(ids).numpy()
    assert hidden.any(axis=(1, 2)).all()
    model.empty_end = (1, END)
    try:
        for given in ((), (paddle.to_tensor(hidden),)):
            np.testing.assert_array_equal(model.encode_text(ids, *given).numpy(), hidden * [[[0.0]], [[1.0]]])
    finally:
        model.empty_end = None


def test_hidden_states_computed_ahead_take_the_place_of_the_text_encoder(model):
    ids, batch = caption([2, 9], 12), make_batch(2)
    hidden = model.encode_text(ids)
    given = {"noisy": batch["noise"], "timesteps": batch["timesteps"], "input_ids": ids}
    with paddle.no_grad():
        plain, ahead, other = (
            model.predict(**given, text_embeddings=one).numpy() for one in (None, hidden, hidden * 2)
        )
    np.testing.assert_array_equal(ahead, plain)
    assert abs(other - plain).max() > 1e-4
