"""A room of `runtime`."""
