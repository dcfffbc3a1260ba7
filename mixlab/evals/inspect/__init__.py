"""What a model sees: receptive fields, kernels, maps and saliency."""
