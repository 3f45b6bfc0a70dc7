"""TD3: a deterministic actor and twin critics, learnt from replay."""
