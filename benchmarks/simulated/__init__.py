"""Learners that compute nothing, and reduce made-up gradients as real ones do."""
