"""Every engine process gets its own cores, those of one NUMA node if that is possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.core import hardware
from fovea.core.errors import ConfigError
from fovea.core.hardware import node_of_cpus
from fovea.engine.process import cores
from fovea.engine.process.cores import divide_cores, split


def machine(nodes: int, each: int) -> tuple[list[tuple[int, ...]], dict[int, int]]:
    """Cores with two hyperthreads, numbered as on common servers, and the node of each CPU."""
    count = nodes * each
    both = [(number, number + count) for number in range(count)]
    return both, {cpu: (cpu % count) // each for cpu in range(2 * count)}


@pytest.mark.parametrize(
    ("nodes", "processes"), [(1, 1), (1, 3), (2, 2), (2, 4), (2, 3), (4, 2), (2, 1), (2, 8)]
)
def test_every_core_belongs_to_one_process(nodes: int, processes: int) -> None:
    both, node_of = machine(nodes, 4)
    parts = split(both, node_of, processes)
    assert sorted(cpu for part in parts for cpu in part) == sorted(node_of)
    assert len(parts) == processes
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 2  # one core
    for one, other in both:
        assert sum(one in part or other in part for part in parts) == 1
    if processes % nodes == 0:
        assert all(len({node_of[cpu] for cpu in part}) == 1 for part in parts)


def test_nodes_that_are_joined_stay_whole() -> None:
    both, node_of = machine(4, 2)
    assert [{node_of[cpu] for cpu in part} for part in split(both, node_of, 2)] == [{0, 1}, {2, 3}]


def test_a_node_with_too_few_cores_is_no_obstacle() -> None:
    assert split([(0,), (1,), (2,), (3,)], {0: 0, 1: 1, 2: 1, 3: 1}, 4) == [(0,), (1,), (2,), (3,)]


def test_more_processes_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: (0, 1, 2))
    with pytest.raises(ConfigError, match="data_parallel is 4, but the server may use 3 physical cores"):
        divide_cores(4)


def test_nodes_are_read(tmp_path: Path) -> None:
    for number, text in enumerate(("0-1,4\n", "2-3\n", "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    (tmp_path / "node9").mkdir()
    assert node_of_cpus(tmp_path) == {0: 0, 1: 0, 4: 0, 2: 1, 3: 1}
    assert node_of_cpus(tmp_path / "none") == {}


def test_memory_and_limits_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_free_memory", lambda: 100)
    monkeypatch.setattr(hardware, "_quota", lambda folder: 4)
    monkeypatch.setattr(hardware, "physical_cores", lambda: tuple(range(8)))
    monkeypatch.setattr(hardware, "_sharers", 1)
    assert (hardware.available_memory(), hardware.usable_cores()) == (100, (0, 1, 2, 3))
    hardware.share_machine(2)
    assert (hardware.available_memory(), hardware.usable_cores()) == (50, (0, 1))
