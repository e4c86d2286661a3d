"""What the estimates and the tuning of TPU kernels share: schedules that libtpu dumps, costs, calls of the kernels."""
