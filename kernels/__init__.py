"""Compute that is worth its own code: each a reference, a fast version and a wrapper."""
