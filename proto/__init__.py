"""The gRPC protocols: the public API and the session between router and worker."""
