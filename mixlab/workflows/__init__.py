"""Many runs at once: comparing models, and carrying one over to other data."""
