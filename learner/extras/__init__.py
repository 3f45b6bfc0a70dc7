"""What few runs need, apart from the learner's core, which never imports it.

Each room here has a torch-free `registry`, by which a config knows its parts: the name of a pace, a
codec or an optimizer, its options, and the entry point by which a learner imports it when it is
chosen.
"""
