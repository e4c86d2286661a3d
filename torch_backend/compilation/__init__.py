"""Models without an implementation in this backend: traced from transformers, rewritten, and run like the others."""
