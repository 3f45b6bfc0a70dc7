"""A parameter server for learners that need not keep step; its pace decides which of them wait."""
