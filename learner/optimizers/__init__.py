"""Optimizers over one flat vector of parameters."""
