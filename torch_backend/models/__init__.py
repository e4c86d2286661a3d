"""Models of the torch backend."""

from torch_backend.models.transformer import Transformer, build_model

__all__ = ["Transformer", "build_model"]
