"""All attacks, in the order of the table."""

from __future__ import annotations

from catalogue import answers, bodies, connections, media
from catalogue.base import Attack

ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        *media.ATTACKS[:1],
        *answers.ATTACKS,
        *media.ATTACKS[1:],
        *bodies.ATTACKS,
        *connections.ATTACKS,
    )
}
