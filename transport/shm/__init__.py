"""Arenas, lanes and the weights board: memory shared by processes of one host."""
