"""A parameter server for learners that need not keep step; its pace decides which of them wait.

Read `pace` first, then `server` and `client`.
"""
