"""The worker that turns prompts into KV cache and a first token."""
