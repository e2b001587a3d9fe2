"""From logits to tokens on the GPU: edits, filters, exponential race, verification."""
