"""`--prediction_type NAME`: what is predicted of x_t = a x_0 + s noise; a name that begins with "flow" is of straight
lines, a = 1 - sigma and s = sigma. A module has `target(latents, noise, scales)` at scales (a, s), which broadcast, and
its inverse `picture(predicted, noisy, scales)`, the x_0 that a prediction says of x_t; and where a network's output is
not the target itself, `prediction(output, noisy, sigma)`, what it says of that."""
