"""Serving on TPU VMs: what a slice is (`topologies`), starting the server there (`python -m tpu.launch`), and compiling
ahead of time what it would run (`python -m tpu.check`)."""
