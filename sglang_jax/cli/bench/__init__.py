"""Benchmarks: workloads, load generators, and metrics of the results."""
