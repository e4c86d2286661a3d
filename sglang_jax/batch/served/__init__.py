"""OpenAI's batches: files of requests that a server answers below all others."""
