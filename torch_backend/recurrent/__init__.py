"""Recurrent states: slots of sequences, convolutions, and matrices of heads."""
