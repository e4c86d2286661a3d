"""One module per family of checkpoints, each with a `FAMILY`: see `architectures.registry`."""
