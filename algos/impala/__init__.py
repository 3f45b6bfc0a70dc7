"""IMPALA: an actor-critic whose lag V-trace corrects."""
