"""Engines run the target: in process, or behind a server. Each engine is one file, named by its YAML."""
