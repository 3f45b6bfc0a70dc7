"""How the learners of one run synchronise: implementations of `GradientSync`, one file per pace."""
