"""Causal attention of ragged prefill chunks over the paged cache."""
