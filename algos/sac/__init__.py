"""SAC: a squashed Gaussian actor and twin critics, learnt from replay."""
