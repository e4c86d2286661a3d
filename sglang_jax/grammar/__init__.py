"""Grammars on the host: compiled in the background, followed token by token, and told as masks. No tensor library."""
