"""How torch's OpenMP threads wait for one another on a CPU."""

from __future__ import annotations

import os

_SPINS = "20000"
"""About a millisecond: longer than a thread of a step mostly waits for another that has a core. A twentieth costs a
third of a quiet machine's speed, and five times as many are as slow on a busy one as the default."""

_CHOSEN_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_shortly() -> None:
    """Has waiting threads of GNU's OpenMP, which torch's wheels for Linux bring, soon sleep; to be called before torch
    is imported, since the library reads its environment once.

    By default they spin for some 15 ms. Where other processes have work to do, the thread that is waited for often
    has no core, and a spinning one keeps it from getting one: at each of the hundreds of barriers of a step.
    """
    if not any(name in os.environ for name in _CHOSEN_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = _SPINS
