"""Measurements: one module per claim, all writing one report format."""
