"""What everything else rests on: errors, registries, configs, the grid, files, and the hooks of the engine."""
