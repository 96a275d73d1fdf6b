"""`--timestep_sampling NAME`: how often each noise level is drawn; `uniform`, all alike, is no law. `METHOD` is a
frozen dataclass of options, flags where these have their names. Called with u [B] float64 in [0, 1), as even as the
samples of a batch are, it gives as many shares t / T in [0, 1]."""
