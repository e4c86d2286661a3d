"""The command line: parses arguments and calls the packages below."""
