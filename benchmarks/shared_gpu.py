"""Let several ranks share one GPU through NCCL, which by itself refuses that."""

from __future__ import annotations

import os

SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def share_gpu(rank: int) -> None:
    """Set the environment of a rank, before it creates a process group.

    NCCL compares hosts and devices; a host name of its own for each rank passes. All bytes then travel through sockets on
    the loopback interface: right for results, order and hangs, meaningless for times.
    """
    os.environ.update(SETTINGS, NCCL_HOSTID=f"rank{rank}")
