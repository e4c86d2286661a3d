"""HTTP: OpenAI's routes, the native routes, metrics. Speaks to the engine only."""
