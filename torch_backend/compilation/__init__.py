"""Models that nobody has written for this backend: traced out of transformers, rewritten, and run like our own."""
