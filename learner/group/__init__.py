"""How learners of a run find each other and form process groups."""
