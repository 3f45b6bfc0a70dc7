"""Configs: the typed schema, the presets, and the way from a target and overrides to a config."""
