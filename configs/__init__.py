"""Configs: the typed schema, the presets, and loading from a target and overrides."""
