"""What a model's reply is made of: text, reasoning, and calls of tools. How families of models write them is a table
(`families.py`); one machine reads them all (`parser.py`)."""
