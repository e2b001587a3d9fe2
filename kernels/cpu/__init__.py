"""What the CPU computes with: products, attention and row operations in C, on float32."""
