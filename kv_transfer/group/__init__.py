"""The KV planes of all ranks of a worker, as one to its role: orders out, last words together."""
