"""A room of `redco_cli`."""
