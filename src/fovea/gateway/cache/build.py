"""Builds the response cache of one worker from its settings."""

from __future__ import annotations

from fovea.core.errors import ConfigError
from fovea.core.names import install_command
from fovea.gateway.cache.cache import ResponseCache
from fovea.gateway.cache.layered import LayeredStore
from fovea.gateway.cache.memory import MemoryStore
from fovea.gateway.cache.settings import KIB, MIB, ResponseCacheSettings

HEAD = 64
"""Bytes of a stored value beside the answer, at most."""


def open_cache(settings: ResponseCacheSettings, redis_url: str = "") -> ResponseCache | None:
    """Return the response cache of one worker; None if the settings turn it off.

    redis_url: Redis that all workers share; empty: each worker has its own answers.

    Raises ConfigError if Redis is wanted, and its client library is not installed, or the URL is wrong.
    """
    capacity = settings.response_cache_mib * MIB
    if not capacity:
        return None
    kept_s = settings.response_cache_ttl_s + settings.response_cache_stale_s
    near = MemoryStore(capacity, ttl_s=kept_s, share=settings.response_cache_share)
    if not redis_url:
        return ResponseCache(near, settings)
    try:
        from fovea.gateway.cache.redis import RedisStore

        far = RedisStore(
            redis_url,
            timeout_s=settings.response_cache_redis_timeout_ms / 1000,
            most_value_bytes=settings.response_cache_answer_kib * KIB + HEAD,
            most_bytes=settings.response_cache_redis_mib * MIB,
        )
    except ImportError:
        raise ConfigError(f"Redis needs its client library: {install_command('redis')}") from None
    except ValueError as error:
        raise ConfigError(f"the URL of Redis: {error}; accepted: redis://HOST:PORT/DB") from None
    return ResponseCache(LayeredStore(near, far, settings.response_cache_near_ttl_s), settings)
