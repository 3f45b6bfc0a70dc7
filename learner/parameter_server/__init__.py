"""A parameter server for learners that need not keep step: who waits for whom is its pace."""
