"""LARS and LAMB, and the forms of Adam and LAMB whose momentum a codec sends."""
