"""A room of `decoder`."""
