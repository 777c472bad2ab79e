"""Divides the cores of a machine among the engine processes of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from fovea.core.errors import ConfigError
from fovea.core.hardware import core_cpus, node_of_cpus, usable_cores

Cpus = tuple[int, ...]


def divide_cores(processes: int) -> list[Cpus]:
    """Return the CPUs of each of so many processes.

    Raises ConfigError if there are fewer cores than processes.
    """
    most = len(usable_cores())
    if processes > most:
        raise ConfigError(
            f"data_parallel is {processes}, but the server may use {most} physical core{'s' * (most > 1)}; "
            f"accepted: 1 to {most}",
            param="data_parallel",
        )
    return split(core_cpus(), node_of_cpus(), processes)


def split(cores: Sequence[Cpus], node_of: Mapping[int, int], processes: int) -> list[Cpus]:
    """Divide cores, so that a process has those of one NUMA node if that is possible, and of few otherwise.

    cores: the CPUs of each physical core; at least one core for each process.
    node_of: the NUMA node of each CPU. CPUs that it lacks count as those of node 0.
    """

    def node(core: Cpus) -> int:
        return node_of.get(core[0], 0)

    in_order = sorted(cores, key=lambda core: (node(core), core))
    nodes = [list(group) for _, group in groupby(in_order, key=node)]
    each, rest = divmod(processes, len(nodes))
    if rest or any(len(group) < each for group in nodes):
        nodes, each = [in_order], processes
    return [part for group in nodes for part in _equal(group, each)]


def _equal(cores: Sequence[Cpus], parts: int) -> list[Cpus]:
    """Divide cores into so many runs, whose lengths differ by at most one core."""
    bounds = [len(cores) * number // parts for number in range(parts + 1)]
    return [
        tuple(sorted(cpu for core in cores[bounds[number] : bounds[number + 1]] for cpu in core))
        for number in range(parts)
    ]
