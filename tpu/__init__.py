"""Serving on TPU VMs: the topologies of slices (`topologies`), starting the server there (`python -m tpu.launch`), and
compiling its programs ahead of time (`python -m tpu.check`)."""
