"""An algorithm of one's own: a module that the config names."""
