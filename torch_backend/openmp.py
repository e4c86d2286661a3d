"""How torch's OpenMP threads wait for one another on a CPU."""

from __future__ import annotations

import os

_SPINS = "20000"
"""About a millisecond: longer than a thread usually waits for another one that has a core. A twentieth of it costs a
third of the speed on a quiet machine; five times as much is as slow as the default on a busy one."""

_CHOSEN_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_shortly() -> None:
    """Has waiting threads of GNU OpenMP, which torch's Linux wheels include, sleep after a short spin. To be called
    before torch is imported, because the library reads its environment once.

    By default, threads spin for some 15 ms. If other processes are busy, the thread that is waited for often has no
    core, and a spinning thread keeps it from getting one, at each of the hundreds of barriers of a step.
    """
    if not any(name in os.environ for name in _CHOSEN_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = _SPINS
