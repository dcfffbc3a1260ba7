"""The engine: models as plans of kernels. Importing `mixlab.engine.answers` fills the hooks that models ask."""
