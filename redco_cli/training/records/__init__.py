"""A room of `training`."""
