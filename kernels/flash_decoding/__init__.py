"""Split-KV attention of 1 to 16 query tokens per sequence over the paged cache."""
