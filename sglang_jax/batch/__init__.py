"""Offline batch generation: files of requests in, files of answers out, however many and whatever happens meanwhile."""
