"""The settings of peers, and what the roles make of the other settings."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.core.errors import ConfigError
from fovea.engine.config import ENCODER_BLOCKS, EngineConfig
from fovea.engine.config.others import PeerSettings, peer_urls

URL = "http://10.0.0.5:8000"


@pytest.mark.parametrize(("settings", "message", "param"), [
    ({"role": "encode"}, "the role encode works for peers.*set peer_key", "peer_key"),
    ({"role": "prefill"}, "the role prefill works for peers.*set peer_key", "peer_key"),
    ({"role": "decode", "prefill_peers": URL}, "peers are named.*set peer_key", "peer_key"),
    ({"encode_peers": URL}, "peers are named.*set peer_key", "peer_key"),
    ({"role": "decode", "peer_key": "k"}, "decode needs addresses: set prefill_peers", "prefill_peers"),
    ({"role": "decode", "peer_key": "k", "encode_peers": URL}, "set prefill_peers", "prefill_peers"),
    ({"role": "prefill-decode", "peer_key": "k"}, "needs addresses: set encode_peers", "encode_peers"),
    ({"role": "encode", "peer_key": "k", "encode_peers": URL}, "the role encode works alone", "role"),
    ({"role": "prefill", "peer_key": "k", "prefill_peers": URL}, "computes prompts itself", "role"),
    ({"connector": "folder"}, "the connector folder needs transfer_dir", "transfer_dir"),
    ({"connector": "rdma"}, "connector is 'rdma'; accepted: .*shm", "connector"),
    ({"role": "all of them"}, "role is 'all of them'; accepted: .*prefill-decode", "role"),
    ({"encode_peers": "10.0.0.5:8000", "peer_key": "k"}, "accepted: http://HOST:PORT", "encode_peers"),
    ({"encode_peers": f"{URL}/v1", "peer_key": "k"}, "accepted: http://HOST:PORT", "encode_peers"),
    ({"encode_peers": "http://a:b@c:1", "peer_key": "k"}, "accepted: http://HOST:PORT", "encode_peers"),
    ({"prefill_peers": f"{URL},ftp://a", "peer_key": "k"}, "accepted: http://HOST:PORT", "prefill_peers"),
    ({"prefill_peers": f"{URL} {URL}", "peer_key": "k"}, "accepted: http://HOST:PORT", "prefill_peers"),
    ({"prefill_peers": f"{URL}?a=b", "peer_key": "k"}, "accepted: http://HOST:PORT", "prefill_peers"),
    ({"peer_timeout_s": 0.0}, "peer_timeout_s is 0.0; accepted", "peer_timeout_s"),
    ({"peer_timeout_s": float("nan")}, "peer_timeout_s is nan; accepted", "peer_timeout_s"),
    ({"peer_timeout_s": 601.0}, "peer_timeout_s is 601.0; accepted", "peer_timeout_s"),
    ({"remote_prefill_tokens": 0}, "remote_prefill_tokens is 0; accepted", "remote_prefill_tokens"),
    ({"transfer_mib": 0}, "transfer_mib is 0; accepted", "transfer_mib"),
    ({"transfer_protocol": "udp"}, "transfer_protocol is 'udp'; accepted: .*tcp", "transfer_protocol"),
    ({"peer_key": "schlüssel"}, "peer_key has .*accepted: 1 to 512", "peer_key"),
    ({"peer_key": " k"}, "peer_key", "peer_key"),
    ({"peer_key": "k\n"}, "peer_key", "peer_key"),
    ({"peer_key": "k" * 513}, "peer_key", "peer_key"),
], ids=str)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        PeerSettings(**settings)
    assert refused.value.param == param
    assert "schlüssel" not in str(refused.value), "a secret is shown"


@pytest.mark.parametrize(("settings", "asked", "answers"), [
    ({}, False, False),
    ({"peer_key": "two words"}, False, True),
    ({"peer_key": "k" * 512}, False, True),
    ({"peer_key": "k", "encode_peers": URL}, True, True),
    ({"role": "encode", "peer_key": "k"}, False, True),
    ({"role": "prefill", "peer_key": "k"}, False, True),
    ({"role": "prefill", "peer_key": "k", "encode_peers": "https://a"}, True, True),
    ({"role": "decode", "peer_key": "k", "prefill_peers": f"{URL}/, http://[::1]:9"}, True, False),
    ({"role": "decode", "peer_key": "k", "prefill_peers": URL, "encode_peers": URL}, True, False),
    ({"role": "prefill-decode", "peer_key": "k", "encode_peers": URL}, True, True),
], ids=str)  # fmt: skip
def test_who_asks_and_who_answers(settings: dict[str, Any], asked: bool, answers: bool) -> None:
    found = PeerSettings(**settings)
    assert (found.asked, found.answers_peers) == (asked, answers)


def test_addresses_lose_slashes_spaces_and_repetitions() -> None:
    assert peer_urls(" http://a:1/, ,http://b:2,http://a:1") == ("http://a:1", "http://b:2")


def test_a_role_leaves_out_what_it_does_not_need() -> None:
    encode = EngineConfig.of(role="encode", peer_key="k", speculate="auto", kv_host_mib=64, max_context=500)
    slim = encode.for_role()
    assert (slim.kv.kv_blocks, slim.speculation.speculate) == (ENCODER_BLOCKS, "off")
    assert slim.peers == encode.peers
    prefill = EngineConfig.of(role="prefill", peer_key="k", speculate="auto", kv_blocks=9).for_role()
    assert (prefill.kv.kv_blocks, prefill.speculation.speculate) == (9, "off")
    whole = EngineConfig.of(speculate="auto")
    assert whole.for_role() is whole
