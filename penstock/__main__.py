"""``python -m penstock`` is the command ``penstock``."""

from penstock.launch.cli import main

if __name__ == "__main__":
    main()
