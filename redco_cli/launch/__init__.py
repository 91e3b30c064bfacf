"""Starting several processes: on this machine, or by the files that a scheduler takes."""
