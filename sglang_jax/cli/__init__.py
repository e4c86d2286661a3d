"""The command line: thin argument parsing over the rooms below."""
