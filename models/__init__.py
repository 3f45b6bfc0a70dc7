"""Networks: their parameters' layout, inference on actors in numpy or torch, training in torch."""
