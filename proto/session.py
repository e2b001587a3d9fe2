"""What both ends of a session agree on beside its messages."""

PROTOCOL = 3
"""Raised whenever the meaning of a message changes; a hello with another number is refused."""

SECRET_KEY = "x-kvferry-secret"
"""Call metadata that carries the cluster's shared secret."""

MAX_MESSAGE_BYTES = 16 << 20
