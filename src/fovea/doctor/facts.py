"""Facts that other rooms know, in the form in which checks read them. cli fills them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Facts about kernels and devices of this machine.

    instruction_set: title of the set that the C++ kernels use here; empty: none.
    failure: why the C++ kernels could not be loaded or compiled; empty: they could.
    cuda_build: version of CUDA that torch was built for; empty: a build for CPUs.
    gpus: number of GPUs that torch can use.
    amx_refusal: why the operating system refuses the AMX of this CPU; empty: it does not, or there is none.
    """

    instruction_set: str
    failure: str
    cuda_build: str
    gpus: int
    amx_refusal: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The report of a checkpoint.

    name: as it was given. is_folder: whether the name is a folder, or the bundled model.
    errors, warnings, unchecked: findings as lines.
    figures: weight_bytes, parameters, kv_bytes_per_token, context and others, where they are known.
    """

    name: str
    is_folder: bool
    errors: Sequence[str]
    warnings: Sequence[str]
    unchecked: Sequence[str]
    figures: Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class BuiltFacts:
    """A folder of encoders built ahead of time.

    folder: its path. exists: whether it holds a manifest.
    grids: number of grids in it.
    problems: files that are missing or changed, or why the manifest cannot be read.
    """

    folder: str
    exists: bool
    grids: int
    problems: Sequence[str]


@dataclass(frozen=True, slots=True)
class Workload:
    """Size of a typical request, for which caches are judged.

    visual_tokens, prompt_tokens, output_tokens: of one request.
    """

    visual_tokens: int
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of a request and its answer, which its KV has to hold."""
        return self.visual_tokens + self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class MonitoringFacts:
    """Names that a deployment's monitoring should have.

    alerts, records: groups of rules in Prometheus. dashboards: uids in Grafana.
    """

    alerts: Sequence[str]
    records: Sequence[str]
    dashboards: Sequence[str]
