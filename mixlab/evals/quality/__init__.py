"""How good a model is: accuracy, robustness, other resolutions."""
