"""W8A16 and W4A16 matrix products for small batches."""
