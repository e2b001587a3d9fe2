"""KV blocks: their accounting, the prefix index over them, and the paged tensor they live in."""
