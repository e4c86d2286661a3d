"""Serving on TPU VMs: what a slice is (`topologies`), starting the server there (`python -m tpu.launch`), compiling
ahead of time what it would run (`python -m tpu.check`), and choosing the sizes of the kernels' blocks
(`python -m tpu.tune`)."""
