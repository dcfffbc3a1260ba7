"""Measurements in one file: what was measured, with what, on which machine, and its tables and figures."""
