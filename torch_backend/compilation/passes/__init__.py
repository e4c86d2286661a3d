"""The passes, one file each. Their order is in `torch_backend.compilation.manager`."""
