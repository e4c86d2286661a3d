"""Reserves an address for one process of a machine, before or while another part of the process listens there. Linux
lets several sockets bind one address while none listens, and gRPC, which connects JAX's nodes, lets several listen. So
each process binds a Unix socket with an abstract name that contains the address: the kernel lets only one process bind
it, and frees it when that process ends."""

from __future__ import annotations

import socket
import sys


def claim_address(host: str, port: int) -> socket.socket | None:
    """A socket that holds the claim until it is closed; None on systems other than Linux. Raises `OSError` if another
    process has claimed the address."""
    if sys.platform != "linux":
        return None
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0sglang-jax {host} {port}")
    except OSError:
        name.close()
        raise
    return name
