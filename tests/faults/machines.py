"""Machines on this machine: network namespaces, each with a cable to this one that a test can pull."""

import ipaddress
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODULES = str(Path(__file__).parents[2])
SHOWN = 4000  # characters of a process's log


def _name(number: int) -> str:
    return f"bw{os.getpid()}n{number}"  # cards have at most 15 characters


@dataclass(frozen=True)
class Machine:
    """A machine that reaches this one by a cable, from its address `there` to `here`, which the card `name` has.

    It reaches all other addresses of this machine too, as long as the cable is whole.
    """

    name: str
    here: str
    there: str

    def cut(self) -> None:
        """Pull the cable: what is sent either way is lost, and nobody is told."""
        subprocess.run(["ip", "link", "set", self.name, "down"], check=True)

    def mend(self) -> None:
        subprocess.run(["ip", "link", "set", self.name, "up"], check=True)

    @contextmanager
    def process(self, module: str, log: Path, *words: str, **variables: str) -> Generator[subprocess.Popen[bytes]]:
        """Run a module with these arguments on the machine, and with no other BATCHWEAVE_ variables than these."""
        others = {name: each for name, each in os.environ.items() if not name.startswith("BATCHWEAVE_")}
        dies_with_us = ["setpriv", "--pdeathsig", "KILL"]
        command = [*dies_with_us, "ip", "netns", "exec", self.name, sys.executable, "-m", module, *words]
        with log.open("wb") as output:
            running = subprocess.Popen(
                command, env={**others, "PYTHONPATH": MODULES, **variables}, stdout=output, stderr=output
            )
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
            print(log.name, log.read_text(errors="replace")[-SHOWN:])  # pytest shows it where a test fails


@contextmanager
def machines(count: int) -> Generator[list[Machine]]:
    """Make machines for the block, in a part of 10.0.0.0/8 that is unlikely to be in use.

    Raises OSError and CalledProcessError where this process may not.
    """
    made: list[Machine] = []
    try:
        for number in range(count):
            net = ipaddress.ip_network(f"10.{213 + number}.{os.getpid() // 64 % 256}.{os.getpid() % 64 * 4}/30")
            here, there = list(net.hosts())
            name = _name(number)
            _run(["ip", "netns", "add", name])
            made.append(Machine(name, str(here), str(there)))
            _run(["ip", "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", name])
            _run(["ip", "address", "add", f"{here}/30", "dev", name])
            _run(["ip", "link", "set", name, "up"])
            address, route = f"address add {there}/30 dev cable", f"route add default via {here}"
            for words in (address, "link set cable up", "link set lo up", route):
                _run(["ip", "-netns", name, *words.split()])
        yield made
    finally:
        for each in made:
            subprocess.run(["ip", "netns", "delete", each.name], check=False)  # its cable goes with it


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
