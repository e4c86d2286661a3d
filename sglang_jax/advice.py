"""Leaves out of the log what a library says while it is imported and does not hold here. Imported before it is.

transformers misses PyTorch, without which it runs no models. Here it reads tokenizers and configs alone.
"""

import logging


def _needs_no_torch(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


logging.getLogger("transformers").addFilter(_needs_no_torch)
