"""Offline batch generation: answers files of requests of any size, and resumes after interruptions."""
