"""Root mean square norm, alone or fused with the residual sum before it."""
