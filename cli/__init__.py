"""The command `penstock`, and the modules of its subcommands."""
