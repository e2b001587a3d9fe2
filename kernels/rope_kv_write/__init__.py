"""RoPE and QK norm fused with the write of K and V into the paged cache."""
