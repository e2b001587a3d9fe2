"""The worker that turns KV cache into tokens."""
