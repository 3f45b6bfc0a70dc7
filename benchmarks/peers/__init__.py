"""Other systems and libraries, run by their own Python, and adapters to them."""
