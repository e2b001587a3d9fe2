"""The two APIs, the queue, the choice of workers and the life of every request."""
