"""What makes models fast on a CPU: kernels, and the caches and plans in front of them."""
