"""A room of `models`."""
