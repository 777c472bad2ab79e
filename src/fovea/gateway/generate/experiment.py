"""The part of an experiment in one request: its variant, and what its end says about that variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fovea.core.errors import Overloaded
from fovea.gateway.amounts import Consumption
from fovea.gateway.exchange import Exchange
from fovea.gateway.experiments.experiments import Experiments
from fovea.gateway.experiments.split import Assignment
from fovea.gateway.experiments.statistics import Outcome, answer_of
from fovea.gateway.inspect.body import Body
from fovea.gateway.tenants.keys import Tenant

if TYPE_CHECKING:
    from fovea.gateway.generate.generation import Generation

NOTHING = Consumption()


def assignment_of(
    experiments: Experiments, model: str, exchange: Exchange, tenant: Tenant, body: Body
) -> Assignment | None:
    """Return the variant of a request; None if its model has no experiment.

    Raises InvalidRequest if the experiment's header names no variant.
    """
    experiment = experiments.of(model)
    if experiment is None:
        return None
    kind, _, name = experiment.sticky_by.partition(":")
    user = body.value.get("user")
    sticky = {
        "key": tenant.name,
        "user": body.text(user) if isinstance(user, str) else "",
        "header": exchange.header(name.lower().encode()),
    }.get(kind, "")
    return experiments.choose(model, exchange.header(experiment.header.lower().encode()), sticky)


def outcome_of(request: Generation) -> Outcome | None:
    """Return what the end of a request says about the variant that it got; None: nothing.

    It says nothing if the client left, has sent a wrong request or has set too short a deadline, or if the
    answer came from the cache.
    """
    status, bill = request.exchange.status, request.bill
    overloaded = status == Overloaded.status
    wrong = (400 <= status < 500 and not overloaded) or request.code == "own_error"
    if request.gone or wrong or request.stored.result in ("hit", "stale"):
        return None
    return Outcome(
        request.services.clock() - request.started,
        request.first_byte_s,
        status >= 500 or overloaded or request.code == "stream_broken",
        NOTHING if bill is None else bill.consumption,
        0 if bill is None else bill.price.cost,
        answer_of(request.tenant.name, request.exchange.request_id),
    )
