"""A room of `families`."""
