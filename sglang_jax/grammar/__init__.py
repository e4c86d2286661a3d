"""Compiles grammars in the background and matches outputs to them on the host, without a tensor library."""
