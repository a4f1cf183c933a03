"""Lets torch's store, by which the ranks of one machine find each other, listen on loopback alone.

It asks nobody who they are, and torch lets it listen on all interfaces whatever address it is told.
"""

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def on_loopback(
    original: Callable[..., Any],
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: Any,
    use_libuv: bool = True,
) -> Any:
    """Create the store of the first rank on its address; several machines have the leader's, which they must reach.

    SGLang found its port free some seconds ago, and another process may have it by now. A rank that is alone needs no
    port that others know: it takes any.
    """
    if rank != 0 or not is_loopback(hostname):
        return original(hostname, port, rank, world_size, timeout, use_libuv)
    from torch._C._distributed_c10d import TCPStore

    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listening = socket.create_server((hostname, 0 if world_size == 1 else port), family=family, backlog=128)
    return TCPStore(
        host_name=hostname,
        port=listening.getsockname()[1],
        world_size=world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        use_libuv=use_libuv,
        master_listen_fd=listening.detach(),
    )


HOOKS = [("torch.distributed.rendezvous._create_c10d_store", on_loopback, HookType.AROUND)]
