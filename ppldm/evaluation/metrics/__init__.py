"""The metrics' mathematics: numpy and scipy, no networks. `base` lists them."""
