"""The seam: what the scheduler hands a backend, and what it gets back."""
