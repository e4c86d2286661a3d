"""The interface between the scheduler and the backends: plans and results."""
