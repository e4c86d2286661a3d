"""KV pages on the host: who owns each, which are reused, which go first. Knows no scheduler and no device."""
