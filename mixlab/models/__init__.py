"""The models: what the papers say, in PyTorch."""
