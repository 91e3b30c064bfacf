"""A room of `sharding`."""
