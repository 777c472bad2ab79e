"""Connects an engine with its peers: those that it asks, and those that ask it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fovea.core.errors import ConfigError
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.config.others import PeerSettings
from fovea.engine.execute.handover import Handover
from fovea.engine.execute.runner import Runner
from fovea.engine.kv.manager import KVManager
from fovea.engine.load import LoadedModel
from fovea.engine.peers.client import Peers, Releases
from fovea.engine.peers.layout import Layouts, checkpoint_files, layout_name, road_name
from fovea.engine.transfer.connect import ConnectorSettings, open_connector, own_folder
from fovea.engine.transfer.connector import Connector
from fovea.engine.vision.encoding import VisualFeatures
from fovea.kernels.choose import results_depend_on

LEASE_S = 10.0
"""Least seconds after which an offer ends that nobody has fetched."""


@dataclass(frozen=True, slots=True)
class Peering:
    """The parts of an engine that have to do with its peers.

    handover: takes values in, and offers them; None: the engine has no peers.
    peers: engines that work for this one; None: there are none.
    """

    handover: Handover | None = None
    peers: Peers | None = None

    def stats(self) -> dict[str, float]:
        """Return figures by the names of `observe.table`."""
        if self.handover is None:
            return {}
        asked = {} if self.peers is None else self.peers.stats()
        counts = self.handover.connector.stats()
        return {
            **asked,
            "values_adopted": self.handover.adopted,
            "offers": counts["offers"],
            "offered_bytes": counts["offered_bytes"],
            "offers_refused": counts["refusals"],
        }

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        if self.handover is not None:
            self.handover.connector.close()


def connect_peers(
    loaded: LoadedModel,
    config: EngineConfig,
    runner: Runner,
    kv: KVManager,
    embeddings: EmbeddingCache[VisualFeatures],
    call: Callable[[Callable[[], None]], None],
) -> Peering:
    """Open the roads that the settings name. call: see `EngineLoop.call`.

    Raises ConfigError if a road cannot be opened, or if a setting excludes it.
    """
    settings = config.peers
    if not settings.asked and not settings.answers_peers:
        return Peering()
    if config.kv.kv_ttl_s and settings.role != "encode":
        raise ConfigError(
            "kv_ttl_s divides prefixes by the clock of this machine, which peers do not share; accepted with "
            "peers: 0",
            param="kv_ttl_s",
        )
    if settings.role in ("prefill", "decode") and not config.kv.prefix_cache:
        raise ConfigError(
            f"the role {settings.role} hands over prefixes; accepted: prefix_cache true", param="prefix_cache"
        )
    divided = config.parallel.size > 1
    if divided and (settings.role in ("encode", "prefill", "decode") or settings.prefill_peers):
        raise ConfigError(
            "the keys and values of an engine on several devices lie in parts, which are not handed over, "
            "and its tower is not divided; accepted with tensor_parallel or pipeline_parallel: the roles all "
            "and prefill-decode, with encode_peers",
            param="tensor_parallel",
        )
    releases = Releases()
    folder = Path(settings.transfer_dir) if settings.transfer_dir else own_folder()
    connector = _open(settings, folder, releases)
    handover = Handover(_layouts(loaded, config, folder), runner, kv, embeddings, connector, divided=divided)
    if not settings.asked:
        return Peering(handover)
    lasting = bool(loaded.model.decoder.config.cross_layers)
    peers = Peers(settings, handover, connector, releases, call, lasting_images=lasting)
    return Peering(handover, peers)


def _open(settings: PeerSettings, folder: Path, releases: Releases) -> Connector:
    return open_connector(
        ConnectorSettings(
            settings.connector,
            capacity_bytes=settings.transfer_mib * MIB,
            folder=folder,
            lease_s=max(LEASE_S, 3 * settings.peer_timeout_s),
            host=settings.transfer_host,
            protocol=settings.transfer_protocol,
        ),
        tell=releases.note,
    )


def _layouts(loaded: LoadedModel, config: EngineConfig, folder: Path) -> Layouts:
    """Name what peers must have in common."""
    info, model = loaded.info, loaded.model
    encoder = layout_name(
        checkpoint_files(loaded.path, config.model.mmproj),
        info.architecture,
        info.dtype,
        info.quantization,
        model.engines.digest,
        results_depend_on(model.kernels),
        _device(model.device),
    )
    decoder = layout_name((), encoder, config.kv.kv_dtype, config.kv.block_size)
    return Layouts(encoder, decoder, road_name(config.peers, folder))


def _device(device: torch.device) -> str:
    """Name the kind of a device: not all kernels compute the same bits on another one."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()
