"""The passes, each a file. Their order is in `torch_backend.compilation.manager`."""
