"""R2D2: Q-values of a recurrent network, learnt from sequences in replay."""
