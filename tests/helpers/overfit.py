"""Training of a model on eight pictures or latents and captions alone, whatever the noise."""

from collections.abc import Iterable

import numpy as np
import paddle


def learn(model, rate: float, batches: Iterable[dict]) -> list[float]:
    """The loss of each batch of arrays or tensors, by its inputs, in an update of AdamW."""
    optimizer = paddle.optimizer.AdamW(rate, parameters=[*model.trained_parameters().values()], weight_decay=0.0)
    losses = []
    model.train()
    for batch in batches:
        loss = model(**{name: paddle.to_tensor(value) for name, value in batch.items()}).value
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def overfit(model, updates: int = 150, **given) -> float:
    """The mean error of the last 10 of so many updates by that of the first 3. given: further inputs, [8, …] each."""
    rng = np.random.default_rng(0)
    moments = np.stack([5 * rng.standard_normal((8, 4, 4, 4)), np.full((8, 4, 4, 4), 0.01)], 1).astype("float32")
    given = {"moments": moments / (model.latent_map.scale * 5), "input_ids": rng.integers(0, 50, (8, 12)), **given}

    def batches():
        for _ in range(updates):
            noise = rng.standard_normal((16, 4, 4, 4), dtype=np.float32)
            drawn = {"noise": noise, "posterior_noise": noise[::-1].copy(), "timesteps": rng.integers(0, 1000, 16)}
            yield {name: np.concatenate([one, one]) for name, one in given.items()} | drawn

    losses = learn(model, 3e-3, batches())
    return np.mean(losses[-10:]) / np.mean(losses[:3])


def with_new_noise(batch: dict, shape: tuple[int, ...], updates: int):
    """The batch so many times, each with noise of this shape and noise levels of its own."""
    rng = np.random.default_rng(2)
    for _ in range(updates):
        noise = rng.standard_normal(shape, dtype=np.float32)
        yield {**batch, "noise": noise, "timesteps": rng.integers(0, 1000, shape[0])}
