"""Models and tokenizers: what they compute, and how they are read from a checkpoint."""
