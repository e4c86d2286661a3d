"""HTTP: OpenAI's routes, the native routes, metrics. Uses only the engine's client."""
