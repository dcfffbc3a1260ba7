"""What a model costs: compute, time and memory."""
