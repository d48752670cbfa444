"""Settings: the typed schema, the presets, and how a command line becomes a checked object."""
