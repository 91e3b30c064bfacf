"""A room of `planning`."""
