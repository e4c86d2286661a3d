"""One module a family of checkpoints, each with a `FAMILY`: see `architectures.registry`."""
