"""Examples: where they come from and in which order they are read."""
