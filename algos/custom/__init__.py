"""A custom algorithm: a module that the config names."""
