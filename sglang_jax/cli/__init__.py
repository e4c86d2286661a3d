"""The command line: thin argument parsing over the packages below."""
