"""What a model is scored by, and its multiply-accumulates."""
