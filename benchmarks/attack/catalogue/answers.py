"""Attacks with the answer: parameters that poison a batch, costly forms, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib

from serving import Setup
from wire import Battle, chat, status_of

from catalogue.base import Attack

POISON = [
    {"temperature": 1, "repetition_penalty": 1e-300, "min_p": 0.1},
    {"temperature": 1e-300, "top_p": 1e-300},
    {"temperature": 2, "repetition_penalty": 5e-324, "presence_penalty": -2, "frequency_penalty": -2},
    {"temperature": 1e-40, "repetition_penalty": 10, "top_k": 1},
    {"temperature": 1, "logit_bias": {"5": -100, "6": 100}, "repetition_penalty": 1e-38, "min_p": 1},
    {"temperature": 2, "top_p": 5e-324, "min_p": 1, "top_k": 2**31 - 1},
    {"temperature": 1, "repetition_penalty": 1e-300, "logprobs": True, "top_logprobs": 20},
    {"temperature": 1, "repetition_penalty": 1e-45, "n": 4, "seed": -(2**63)},
]


async def poison(battle: Battle) -> None:
    async def act(number: int) -> None:
        await battle.ask(
            chat("Say it again and again.", max_tokens=32, ignore_eos=True, **POISON[number % len(POISON)])
        )

    await battle.crowd(16, act)


async def long_prompts(battle: Battle) -> None:
    """Send the longest prompts, each another one, and ask for the log probabilities of all their tokens."""

    async def act(number: int) -> None:
        words = " ".join(f"{number * 1000 + place} red circles" for place in range(1000))
        await battle.ask(chat(words, max_tokens=1, prompt_logprobs=1))

    await battle.crowd(16, act)


async def costly_forms(battle: Battle) -> None:
    """Ask for answers in ever new forms. Each takes more time to compile than is allowed."""
    dots = [f"/(.|\\n){{0,{i}}}[a-{chr(98 + i % 20)}](.|\\n){{{i}}}/" for i in range(1, 40)]

    async def act(number: int) -> None:
        grammar = f'start: "{number}" A\nA: {" & ".join(dots)}'
        await battle.ask(chat("Go.", max_tokens=4, guided_grammar=grammar))

    await battle.crowd(24, act)


async def deadlines(battle: Battle) -> None:
    """Ask for answers that are late at once, so that every answer is an error of the backend's."""
    late = chat("Go.", max_tokens=64, timeout=0.001)
    await battle.crowd(8, lambda _: battle.ask(late))


async def ambiguous_grammar(battle: Battle) -> None:
    """Prescribe a grammar by which a text can be read in 80 ways per letter, so each token takes long."""
    rules = range(80)
    text = f"start: {' | '.join(f'r{number} start' for number in rules)} | r0\n"
    text += "".join(f'r{number}: "a" | "b"\n' for number in rules)

    async def act(number: int) -> None:
        form = {"grammar": f"{text}// {number}"}
        await battle.ask(chat("Say a.", max_tokens=24, min_tokens=20, structured_outputs=form))

    await battle.crowd(4, act)


async def deaf_streams(battle: Battle) -> None:
    """Open 96 streams of long answers with a receive buffer of 1 KiB, read the status, and read no more."""
    question = chat(
        "Tell a long story.", stream=True, max_tokens=4000, ignore_eos=True, logprobs=True, top_logprobs=20
    )

    async def listener() -> None:
        while battle.left > 0:
            try:
                line = await battle.connect(receive_buffer=1024)
            except (OSError, TimeoutError):
                battle.tally["refused"] += 1
                await asyncio.sleep(0.2)
                continue
            with contextlib.closing(line), contextlib.suppress(OSError, TimeoutError):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(line, question)
                status = await asyncio.wait_for(status_of(line), max(0.1, battle.left))
                battle.tally[status] += 1
                # A refused client comes back; the others hold their stream to the end.
                await asyncio.sleep(max(0.0, battle.left) if status == "200" else 0.2)

    async with asyncio.TaskGroup() as group:
        for _ in range(96):
            group.create_task(listener())


ATTACKS = [
    Attack(
        "sampling", "key", "16 clients send sampling parameters at the edge of the accepted ranges", poison
    ),
    Attack(
        "long-prompts", "key", "16 clients send prompts of 7,000 tokens and have them scored", long_prompts
    ),
    Attack(
        "ambiguous-grammar",
        "key",
        "4 clients prescribe a grammar by which a text can be read in 80 ways per letter",
        ambiguous_grammar,
    ),
    Attack("deaf-streams", "key", "96 clients ask for long streams and do not read them", deaf_streams),
    Attack(
        "costly-forms",
        "key",
        "24 clients ask for answers in ever new forms that take long to compile",
        costly_forms,
    ),
    Attack(
        "deadlines",
        "key",
        "8 clients send requests with a timeout of a millisecond to a gateway before the server",
        deadlines,
        setup=Setup(gateway=True),
    ),
]
