"""A matrix product whose rows do not depend on the batch."""
