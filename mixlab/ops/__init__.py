"""The numerics as pure functions: a plain reference beside every fast path."""
