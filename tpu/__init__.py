"""Serving on TPU VMs: the topologies of slices (`topologies`), starting the server there (`python -m tpu.launch`),
compiling its programs ahead of time (`python -m tpu.check`), and choosing the kernels' block sizes (`python -m
tpu.tune`)."""
