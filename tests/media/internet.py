"""Host names, addresses and answers for a `Fetcher`, without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import httpx
import pytest

from fovea.core.errors import FoveaError
from fovea.media.fetch.fetcher import Fetcher
from fovea.media.limits import MediaLimits
from tests.media.samples import sample

PNG = sample()
PUBLIC = "93.184.215.14"


class Internet:
    """A resolver with fixed addresses and a transport that answers requests; both record their calls.

    lookups: host names that were resolved. requests: requests that the transport received.
    """

    def __init__(
        self,
        names: Mapping[str, Sequence[str]],
        answer: Callable[[httpx.Request], httpx.Response] = lambda _: httpx.Response(200, content=PNG),
    ) -> None:
        self.names = {name: list(addresses) for name, addresses in names.items()}
        self.lookups: list[str] = []
        self.requests: list[httpx.Request] = []
        self.answer = answer

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append(host)
        if host not in self.names:
            raise OSError("no such name")
        return self.names[host]

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.answer(request)

    def fetcher(self, limits: MediaLimits | None = None) -> Fetcher:
        return Fetcher(
            limits or MediaLimits(), resolve=self.resolve, transport=httpx.MockTransport(self.handle)
        )


async def fails(fetcher: Fetcher, url: str, kind: type[FoveaError], *fragments: str) -> FoveaError:
    with pytest.raises(kind) as caught:
        await fetcher.fetch(url)
    assert type(caught.value) is kind
    for fragment in fragments:
        assert fragment in caught.value.message
    return caught.value
