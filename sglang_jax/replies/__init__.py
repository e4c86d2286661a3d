"""Splits a model's reply into text, reasoning, and tool calls: one `parser` for the formats in `families`."""
