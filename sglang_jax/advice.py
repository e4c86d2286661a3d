"""Filters a misleading log line of transformers, before its import: that it cannot run models without PyTorch, although
here it only reads tokenizers and configs."""

import logging


def _needs_no_torch(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


logging.getLogger("transformers").addFilter(_needs_no_torch)
