"""Kinds of parts of layers, one per file.

A kind is a frozen config that declares its parameters (`parameters`), what it caches of sequences, and how devices
share it (`sharded`): see `part.LayerPart`. Backends register an implementation for each config type.
"""
