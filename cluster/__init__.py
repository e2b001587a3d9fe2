"""The one builder and supervisor: configuration in, running actors and addresses out."""
