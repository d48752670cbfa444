"""Models of other tools: read into a run directory, and written from one."""
