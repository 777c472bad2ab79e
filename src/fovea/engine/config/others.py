"""Settings of an engine that works with others: peers, further devices, routers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fovea.core.errors import ConfigError
from fovea.core.names import is_socket_address
from fovea.core.settings import check_settings, setting
from fovea.engine.config.memory import MOST_MIB

ROLES = ("all", "encode", "prefill", "decode", "prefill-decode")
SERVING_ROLES = ("all", "decode", "prefill-decode")
"""The roles of engines that answer clients. The others work for these alone."""
CONNECTORS = ("shm", "mooncake", "folder")
LONGEST_PEER_KEY = 512
"""As long as the longest key of a client."""
_PEER_KEY = re.compile(f"([!-~]([ -~]{{0,{LONGEST_PEER_KEY - 2}}}[!-~])?)?")


def _peer_urls(text: str) -> str:
    good = all(re.fullmatch(r"https?://[^\s/?#@]+/?", url) for url in peer_urls(text))
    return "" if good else "http://HOST:PORT or https://HOST:PORT, several with commas"


def peer_urls(text: str) -> tuple[str, ...]:
    """Return the addresses that a setting names, without slashes at their ends."""
    return tuple(dict.fromkeys(url.strip().rstrip("/") for url in text.split(",") if url.strip()))


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The role of this engine, and the engines that work for it."""

    role: str = setting(
        "all",
        "What this engine does. all: everything. encode: encodes images for others. prefill: computes "
        "prompts for others. decode: answers clients, and has prompts computed by prefill_peers. "
        "prefill-decode: answers clients, and has images encoded by encode_peers. See docs/roles.md.",
        choices=ROLES,
    )
    encode_peers: str = setting(
        "",
        "Addresses of engines that encode images for this one, such as http://10.0.0.5:8000, with commas.",
        check=_peer_urls,
        words="addresses",
    )
    prefill_peers: str = setting(
        "",
        "Addresses of engines that compute prompts for this one, with commas.",
        check=_peer_urls,
        words="addresses",
    )
    peer_key: str = setting(
        "",
        "Secret that all peers share: it is sent to peers, and opens the routes by which they ask this one. "
        "FOVEA_PEER_KEY keeps it out of the process list.",
    )
    peer_timeout_s: float = setting(
        10.0,
        "Seconds without news from a peer after which its work is done here. A peer that says that it is "
        "busy is waited for six times as long.",
        low=0.1,
        high=600,
    )
    remote_prefill_tokens: int = setting(
        256,
        "Fewest tokens of a prompt that are not cached here for which a prefill peer is asked.",
        low=1,
        high=MOST_MIB,
    )
    connector: str = setting(
        "shm",
        "How results travel to those who ask this engine. shm: shared memory of one host. mooncake: "
        "Mooncake's transfer engine over TCP or RDMA. folder: files in transfer_dir.",
        choices=CONNECTORS,
    )
    transfer_dir: str = setting(
        "",
        "Folder of the connectors: of their sockets (shm), or of the files (folder). Peers on one host name "
        "the same one. Empty: a folder of this user in the system's temporary folder; folder needs a name.",
    )
    transfer_mib: int = setting(
        256, "Memory, or disk space, for results that wait to be fetched, in MiB.", low=1, high=MOST_MIB
    )
    transfer_host: str = setting(
        "",
        "Address by which peers reach this host, for mooncake. It listens on all interfaces, without a key.",
    )
    transfer_protocol: str = setting("tcp", "Protocol of mooncake.", choices=("tcp", "rdma"))

    def __post_init__(self) -> None:
        check_settings(self)
        if not _PEER_KEY.fullmatch(self.peer_key):  # the message must not show it
            raise ConfigError(
                f"peer_key has {len(self.peer_key)} characters, or some that cannot be sent; accepted: 1 to "
                f"{LONGEST_PEER_KEY} printable ASCII characters without spaces at its ends",
                param="peer_key",
            )
        if self.role not in SERVING_ROLES and not self.peer_key:
            raise ConfigError(
                f"the role {self.role} works for peers, which need a secret: set peer_key", param="peer_key"
            )
        if self.asked and not self.peer_key:
            raise ConfigError(
                "peers are named, but no secret that opens them: set peer_key", param="peer_key"
            )
        for role, name in (("decode", "prefill_peers"), ("prefill-decode", "encode_peers")):
            if self.role == role and not getattr(self, name):
                raise ConfigError(f"the role {role} needs addresses: set {name}", param=name)
        if self.role == "encode" and self.asked:
            raise ConfigError("the role encode works alone; it has no peers", param="role")
        if self.role == "prefill" and self.prefill_peers:
            raise ConfigError(
                "the role prefill computes prompts itself; accepted: encode_peers", param="role"
            )
        if self.connector == "mooncake" and not self.transfer_host:
            raise ConfigError(
                "the connector mooncake needs the address of this host for its peers: set transfer_host",
                param="transfer_host",
            )
        if self.connector == "folder" and not self.transfer_dir:
            raise ConfigError("the connector folder needs transfer_dir", param="transfer_dir")

    @property
    def asked(self) -> bool:
        """Whether this engine asks others."""
        return bool(self.encode_peers or self.prefill_peers)

    @property
    def answers_peers(self) -> bool:
        """Whether others may ask this engine."""
        return bool(self.peer_key) and self.role != "decode"


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """The processes that compute one model together, one for each device (docs/parallel.md)."""

    tensor_parallel: int = setting(
        1,
        "Processes that divide each layer of the decoder. Its numbers of heads must be divisible by it.",
        low=1,
        high=1024,
    )
    pipeline_parallel: int = setting(
        1,
        "Stages into which the layers of the decoder are divided, each with tensor_parallel processes.",
        low=1,
        high=1024,
    )
    parallel_timeout_s: int = setting(
        120,
        "Seconds after which a process that does not answer counts as lost, and the engine ends.",
        low=1,
        high=86400,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.tensor_parallel * self.pipeline_parallel


def _listen(text: str) -> str:
    if not text or is_socket_address(text):
        return ""
    return "tcp://HOST:PORT with * for all addresses of this machine, or ipc://PATH"


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Events for routers, which say what the caches hold (docs/routers.md).

    KV events contain the token ids of prompts. Anyone who reaches an address may read them.
    """

    kv_events: str = setting(
        "",
        "Address on which cached keys and values are announced over ZMQ, in vLLM's format, such as "
        "tcp://*:5557; empty: they are not. Needs pip install 'fovea-vlm[events]'.",
        check=_listen,
    )
    kv_events_replay: str = setting(
        "", "Address on which subscribers ask for earlier announcements of keys and values.", check=_listen
    )
    kv_events_topic: str = setting(
        "", "Topic of these announcements. llm-d wants kv@POD_IP:PORT@MODEL, with the port of the server."
    )
    encoder_events: str = setting(
        "",
        "Address on which cached encoder outputs are announced, for routers that know them, such as Fovea's "
        "gateway; empty: they are not. Needs pip install 'fovea-vlm[events]'.",
        check=_listen,
    )
    encoder_events_replay: str = setting(
        "", "Address on which subscribers ask for earlier announcements of encoder outputs.", check=_listen
    )
    events_kept: int = setting(
        10_000,
        "Messages of each kind that are kept for subscribers who missed some. A subscriber that needs older "
        "ones gets the whole state instead.",
        low=1,
        high=10_000_000,
    )
    event_rank: int = setting(
        0, "Number of this engine among several behind one server.", low=0, high=4096, internal=True
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("kv_events", "encoder_events"):
            if getattr(self, f"{name}_replay") and not getattr(self, name):
                raise ConfigError(
                    f"{name}_replay needs {name}: set both",
                    param=f"{name}_replay",
                )
        used = [getattr(self, name) for name in EVENT_ADDRESSES if getattr(self, name)]
        if len(set(used)) < len(used):
            raise ConfigError(
                f"{', '.join(EVENT_ADDRESSES)} must be different addresses; got: {', '.join(used)}",
                param="kv_events",
            )

    def address(self, name: str) -> str:
        """Return the address of a setting for this engine. As in vLLM, the port grows by `event_rank`."""
        text = str(getattr(self, name))
        if not text or not self.event_rank:
            return text
        head, _, port = text.rpartition(":")
        return (
            f"{text}-{self.event_rank}"
            if text.startswith("ipc:")
            else f"{head}:{int(port) + self.event_rank}"
        )


def check_event_addresses(settings: EventSettings, engines: int) -> None:
    """Refuse addresses that several engines behind one server would share. Raises ConfigError."""
    used: dict[str, str] = {}
    for rank in range(engines):
        for name in EVENT_ADDRESSES:
            address = replace(settings, event_rank=rank).address(name)
            if address and address in used:
                raise ConfigError(
                    f"engine {rank} would announce by {name} on {address}, as another engine does by "
                    f"{used[address]}; accepted for {engines} engines: ports at least {engines} apart",
                    param=name,
                )
            used[address] = name


EVENT_ADDRESSES = ("kv_events", "kv_events_replay", "encoder_events", "encoder_events_replay")
