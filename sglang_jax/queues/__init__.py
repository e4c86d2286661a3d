"""Queues in which tenants share fairly; nothing here knows what waits."""
