"""The Python client of the gRPC API."""
