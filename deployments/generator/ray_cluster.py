"""The Ray cluster of a replica, for the processes that it starts."""

from __future__ import annotations

import os

import ray


def name_cluster() -> None:
    """Name this replica's cluster in RAY_ADDRESS.

    The engine runs in a process of its own, which looks for the cluster of its workers. Without the
    address, it would start another one, or join any that the machine has.
    """
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
