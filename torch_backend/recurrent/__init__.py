"""Recurrent states in torch operations: where sequences have theirs, convolutions, and matrices of heads."""
