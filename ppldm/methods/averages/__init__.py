"""An average of the weights: shadow <- d shadow + (1 - d) weight (`networks/ema.py`). `METHOD` is a frozen dataclass of
options; `at` gives d of the update-th update, counted from 1, where 1 leaves the average as it is and 0 copies."""
