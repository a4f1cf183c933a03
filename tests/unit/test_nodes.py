"""What starts the machines of one engine tells each which it is."""

import pytest

from service.errors import StartError
from service.settings import load_settings
from service.worker.nodes import Nodes, first_host


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", "a"),
        ("a:29500", "a:29500"),
        ("10.0.0.4\n10.0.0.5\n", "10.0.0.4"),
        ("a,b,c", "a"),
        ("node07", "node07"),
        ("node[07-09,12],other", "node07"),
        ("node[7,9]", "node7"),
        ("rack[1-2]-gpu", "rack1-gpu"),
        ("[fd00::1]:20000", "[fd00::1]:20000"),
        ("", ""),
    ],
)
def test_the_first_of_a_list_of_hosts_leads(text: str, host: str) -> None:
    assert first_host(text) == host


SLURM = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "node[07-08]"}
SKYPILOT = {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "3", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
SET = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "set-0.set.default"}
OWN = {"BATCHWEAVE_NODES": "3", "BATCHWEAVE_NODE_RANK": "2", "BATCHWEAVE_LEADER": "first:29500"}


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, None),
        (SLURM, Nodes(2, 1, "node07:20000")),
        (SKYPILOT, Nodes(4, 3, "10.0.0.4:20000")),
        (SET, Nodes(2, 0, "set-0.set.default:20000")),
        (OWN, Nodes(3, 2, "first:29500")),
        (OWN | {"BATCHWEAVE_LEADER": "[fd00::1]"}, Nodes(3, 2, "[fd00::1]:20000")),
        (OWN | {"BATCHWEAVE_LEADER": "[fd00::1]:7"}, Nodes(3, 2, "[fd00::1]:7")),
        (SLURM | OWN, Nodes(3, 2, "first:29500")),
        (SLURM | {"BATCHWEAVE_NODES": "1"}, None),
    ],
)
def test_each_starter_is_understood(
    variables: dict[str, str], nodes: Nodes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Nodes.of(load_settings()) == nodes


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"BATCHWEAVE_NODES": "2"}, "BATCHWEAVE_LEADER must be the address"),
        ({"BATCHWEAVE_NODES": "2", "BATCHWEAVE_LEADER": "fd00::1"}, r"in brackets, as in \[fd00::1\]:20000"),
        ({"BATCHWEAVE_NODES": "2", "BATCHWEAVE_NODE_RANK": "2", "BATCHWEAVE_LEADER": "a"}, "numbered from 0 to 1"),
    ],
)
def test_what_is_missing_is_named(variables: dict[str, str], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartError, match=fault):
        Nodes.of(load_settings())
