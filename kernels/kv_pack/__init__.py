"""Gather paged KV into a slab and scatter it back, with the digest on the way."""
