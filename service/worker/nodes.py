"""Says which machines run one engine, and which of them this is."""

import re
from dataclasses import dataclass
from typing import Any

from service.errors import StartError
from service.settings import Settings

PORT = 20_000  # of the leader, unless BATCHWEAVE_LEADER names one


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of one engine. `rank`: which of the `count` this is; `leader`: host:port at which they meet."""

    count: int
    rank: int
    leader: str

    @classmethod
    def of(cls, settings: Settings) -> "Nodes | None":
        """Return what the settings say; None for an engine with one machine. Raises StartError."""
        if settings.nodes == 1:
            return None
        if settings.node_rank >= settings.nodes:
            raise StartError(
                f"BATCHWEAVE_NODE_RANK is {settings.node_rank}, but the {settings.nodes} nodes (BATCHWEAVE_NODES) are "
                f"numbered from 0 to {settings.nodes - 1}."
            )
        host = first_host(settings.leader or "")
        if host.count(":") > 1 and not host.startswith("["):
            raise StartError(f"BATCHWEAVE_LEADER: write the IPv6 address {host} in brackets, as in [{host}]:{PORT}.")
        if not host:
            raise StartError(
                f"This engine has {settings.nodes} nodes (BATCHWEAVE_NODES), so BATCHWEAVE_LEADER must be the address "
                "of the first one."
            )
        return cls(settings.nodes, settings.node_rank, host if _has_port(host) else f"{host}:{PORT}")

    @property
    def engine_args(self) -> dict[str, Any]:
        return {"nnodes": self.count, "node_rank": self.rank, "dist_init_addr": self.leader}


def first_host(text: str) -> str:
    """Return the first of a list of hosts, as in `a b`, `a,b` or Slurm's `node[07-09,12],other`."""
    first = re.split(r"[\s,](?![^\[]*\])", text.strip())[0]
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first) if not first.startswith("[") else first


def _has_port(host: str) -> bool:
    return re.search(r":\d+$", host.rpartition("]")[2]) is not None
