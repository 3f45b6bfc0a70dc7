"""Arenas, lanes and the weights board: memory that processes of one host share."""
