"""Filters a misleading log line of a library's import. Must be imported before the library.

transformers warns that it cannot run models without PyTorch, but here it only reads tokenizers and configs.
"""

import logging


def _needs_no_torch(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


logging.getLogger("transformers").addFilter(_needs_no_torch)
