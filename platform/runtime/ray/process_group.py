"""Process groups of learners: ranks in different processes form torch's default group through a TCP store."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address

import psutil

from rl_platform.errors import Problem
from rl_platform.runtime.collective_limit import set_collective_limit
from rl_platform.runtime.weights.group import RENDEZVOUS_S


def use_interface_of(address: str) -> None:
    """Makes gloo and NCCL use the network interface with this address, unless environment variables name one.

    By default gloo resolves the machine's name, which /etc/hosts may map to the loopback interface. NCCL selects the
    first interface, which may belong to a container network.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if not address.startswith("127."):  # NCCL refuses the loopback interface
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def unreachable(processes: Mapping[str, tuple[str, str]]) -> list[Problem]:
    """Returns a problem for each process of several machines whose address is of the loopback interface.

    processes: by name the machine and Ray's address of its node.
    """
    if len({machine for machine, _ in processes.values()}) == 1:
        return []
    hint = "start Ray there with --node-ip-address=ADDRESS, an address of an interface that the other machines reach"
    return [
        Problem("cluster.address", f"other machines cannot reach {name} on {machine}", value=address, hint=hint)
        for name, (machine, address) in processes.items()
        if _is_loopback(address)
    ]


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a host name, with which Ray may have been started
        return False


class Rendezvous:
    """The TCP store of one group, opened in rank 0's process."""

    def __init__(self, address: str, world_size: int) -> None:
        import torch.distributed as dist

        listening = socket.create_server((address, 0))  # the store itself would listen on all interfaces
        self.store = dist.TCPStore(
            address,
            listening.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timedelta(seconds=RENDEZVOUS_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self.port: int = self.store.port


def join_group(
    rendezvous: Rendezvous | tuple[str, int], rank: int, world_size: int, timeout_s: float, cuda: bool
) -> None:
    """Joins the default process group of this process; returns when all ranks have. `timeout_s`: of a collective."""
    import torch.distributed as dist

    store = rendezvous.store if isinstance(rendezvous, Rendezvous) else None
    if store is None:
        address, port = rendezvous  # type: ignore[misc]
        store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timedelta(seconds=RENDEZVOUS_S))
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
    )
    set_collective_limit(limit)


def leave_group() -> None:
    """Destroys the process group of this process, if it has one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
