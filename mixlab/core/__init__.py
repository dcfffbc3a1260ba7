"""What everything else stands on: errors, registries, grids, files, and the faults of real machines."""
