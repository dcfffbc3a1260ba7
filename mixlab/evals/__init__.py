"""Measurements of a model: each is one function over a model and, where it needs them, images."""
