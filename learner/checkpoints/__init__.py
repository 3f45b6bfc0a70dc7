"""What a learner saves, and how it resumes."""
