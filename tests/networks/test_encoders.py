"""What a text encoder with a projection makes of captions, against transformers."""

import needs
import numpy as np
import paddle
import pytest

needs.need("parity")

import torch  # noqa: E402
from transformers import CLIPTextConfig, CLIPTextModelWithProjection  # noqa: E402

from ppldm.networks.model import projected_caption  # noqa: E402
from ppldm.weights.fill import component_of, fill_component  # noqa: E402
from ppldm.weights.source import read_component  # noqa: E402

KIND, END = "projected_text_encoder", 99


@pytest.mark.parametrize("padding", [END, 0])
def test_hidden_states_and_projection_are_those_of_transformers(padding, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "projection_dim": 24, "vocab_size": 100}
    ids = {"bos_token_id": 98, "eos_token_id": END, "pad_token_id": padding, "max_position_embeddings": 12}
    theirs = CLIPTextModelWithProjection(
        CLIPTextConfig(**sizes, **ids, num_hidden_layers=3, num_attention_heads=4, hidden_act="gelu")
    ).eval()
    theirs.save_pretrained(tmp_path / "text_encoder")
    words, lengths = np.full((3, 12), padding), (4, 10, 0)
    mask = np.zeros((3, 12), np.int64)
    for row, length in enumerate(lengths):
        words[row, : length + 2] = [98, *range(1, length + 1), END]
        mask[row, : length + 2] = 1
    with torch.no_grad():
        expected = theirs(torch.tensor(words), attention_mask=torch.tensor(mask), output_hidden_states=True)
    ours = fill_component(KIND, read_component(KIND, tmp_path))
    ours.eval()
    hidden, pooled = projected_caption(ours, paddle.to_tensor(words), END)
    np.testing.assert_allclose(hidden.numpy(), expected.hidden_states[-1].numpy(), atol=1e-5)
    np.testing.assert_allclose(pooled[:, 0].numpy(), expected.text_embeds.numpy(), atol=1e-5)
    assert component_of(KIND, ours).config["projection_dim"] == 24
