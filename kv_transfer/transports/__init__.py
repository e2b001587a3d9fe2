"""The ways to move slabs: one module per transport, what several share, and one that does harm."""
