"""`--loss_weighting NAME`: how much the squared error of a prediction counts at a noise level, by a**2 and s**2, with
x_t = a x_0 + s noise. What is predicted differs from x_0, at a given x_t, by a factor: an error of the noise is a / s
times that of x_0, of the velocity (a**2 + s**2) / s times, which is 1 / s where the squares sum to 1, of flow 1 / s.

`METHOD` is a frozen dataclass of options, flags where these have their names. It has
`weights(signal, noise, prediction_type)`, of a**2 and s**2 of each level, float64; or, where weights are learned,
`learned(process)`: a layer, kept in checkpoints, with `weights(timesteps)`, `sums(losses)`, and `update(sums)` of all
samples of an update."""
