"""Kinds of parts that layers are made of, a file each.

A kind is a frozen config, which says by itself which parameters it has (`parameters`), what it keeps of sequences, and
how several devices share it (`sharded`): see `part.LayerPart`. Backends register what computes it by the config's type.
"""
