"""Load generators: workloads, clients and the figures drawn from what they saw."""
