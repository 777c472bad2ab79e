"""The bill of one request: reserved before it is sent, settled when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fovea.gateway.amounts import Amounts, Consumption
from fovea.gateway.generate.usage import consumption_of
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.services import Services
from fovea.gateway.tenants.accounts import Reservation
from fovea.gateway.tenants.keys import Tenant
from fovea.gateway.usage.prices import Price

NOTHING = Consumption()
FREE = Price(0)


class Bill:
    """The bill of one request.

    consumption: tokens that it has used.
    price: what they cost.
    """

    __slots__ = ("_demand", "_reservation", "_services", "_tenant", "consumption", "price")

    def __init__(self, services: Services, tenant: Tenant, demand: Demand) -> None:
        self._services = services
        self._tenant = tenant
        self._demand = demand
        self._reservation: Reservation | None = None
        self.consumption = NOTHING
        self.price = FREE

    async def reserve(self, model: str) -> None:
        """Take the most that the request may use from the tenant's limits. Raises Overloaded."""
        demand = self._demand
        expected = self._estimate(demand.answer_tokens)
        cost = 0 if self._services.prices is None else self._services.prices.cost(model, expected)
        await self._take(Amounts(1, demand.text_tokens, demand.visual_tokens, cost))

    async def take_stored(self, model: str, usage: Mapping[str, Any] | None) -> None:
        """Take a request that is answered from the cache: it counts as a request, and costs what it costs.

        usage: of the stored answer. Raises Overloaded.
        """
        self.consumption = consumption_of(usage, self._estimate(0))
        self._price(model, stored=True)
        if self._reservation is None:  # an older answer stands in for backends, for which there is one
            await self._take(Amounts(1, 0, 0, self.price.cost))

    def use(self, model: str, usage: Mapping[str, Any] | None, generated: int, *, whole: bool = True) -> None:
        """Note what the request has used.

        usage: what the backend says of it; None: nothing. generated: tokens of the answer that were seen.
        whole: whether the answer has reached its end. Before it, usage may tell less than was seen.
        """
        self.consumption = used = consumption_of(usage, self._estimate(generated))
        if not whole and generated > used.completion_tokens:
            self.consumption = used._replace(completion_tokens=generated, estimated=True)
        self._price(model)

    def use_most(self, model: str, *, free: bool = False) -> None:
        """Note the most that the request may have used: nobody has seen what was generated.

        free: it costs no money, because the time of the gateway was over, and its client got nothing.
        """
        self.consumption = self._estimate(self._demand.answer_tokens)._replace(estimated=True)
        if free:
            self.price = FREE._replace(estimated=True)
        else:
            self._price(model)

    async def settle(self, *, answered: bool, stored: bool) -> None:
        """Replace what was reserved by what was used. A request on which no backend has worked costs nothing.

        answered: whether a backend has answered it, or has worked on it until it was given up.
        stored: whether the answer came from the cache, so that no tokens were used.
        """
        if self._reservation is None:
            return
        used = Amounts()
        if stored:
            used = Amounts(1, 0, 0, self.price.cost)
        elif answered:
            tokens = self.consumption
            used = Amounts(1, tokens.text_tokens, tokens.visual_tokens, self.price.cost)
        await self._services.accounts.settle(self._reservation, used)

    async def _take(self, amounts: Amounts) -> None:
        tenant = self._tenant
        self._reservation = await self._services.accounts.reserve(tenant.name, tenant.limits, amounts)

    def _estimate(self, completion: int) -> Consumption:
        demand = self._demand
        prompt = demand.prompt_tokens + demand.visual_tokens
        return Consumption(prompt, demand.visual_tokens, 0, completion, len(demand.images))

    def _price(self, model: str, *, stored: bool = False) -> None:
        if self._services.prices is not None:
            self.price = self._services.prices.price(model, self.consumption, cached_response=stored)
        else:
            self.price = FREE._replace(estimated=self.consumption.estimated)
