"""How good a model is, in numbers that say what they depend on."""
