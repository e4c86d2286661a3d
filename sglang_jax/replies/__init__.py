"""Splits a model's reply into text, reasoning, and tool calls. A table has the formats of model families
(`families.py`); one parser reads them all (`parser.py`)."""
