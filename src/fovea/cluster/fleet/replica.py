"""One replica of a simulated fleet: a coarse twin of the engine's scheduler that costs little time of Python.

It computes the same kinds of steps as `engine.schedule`, with the same cost model, but it keeps only what
decides their length: how many sequences decode and their context, which prompts and images are unfinished,
and which images and conversations the caches hold.

While prompts or images are computed, each step is computed by itself: images and prompts share the time that
the bound `pace` leaves beside the decodes. While sequences only decode, nothing but their context changes,
which grows by one token for each of them in every step. So the time of any number of such steps is a sum in
closed form, and the replica jumps to the step after which a sequence ends, or after which a new request can
join. A request costs some tens of microseconds in this way, and milliseconds in the engine's scheduler.

Left out are preemption (a request joins when its whole prompt and answer have room), the order of policies
and short prompts, targets for the gaps, and drafts. `docs/cluster.md` has the differences in figures.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Self

from fovea.cluster.scaling import Signals
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.schedule.itl_limit import CROWDING, FEWEST_TOKENS, FREE_BATCH, IDLE_STEP_S
from fovea.engine.schedule.scheduler import LOOKAHEAD
from fovea.engine.simulate.assemble import pool_tokens
from fovea.planner.cost import Composition, CostModel, pairs_of

SYSTEM = "system"
"""Key of the prefix that all requests begin with."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The abilities of a replica.

    cost: times of steps and images, and sizes.
    kv_tokens: tokens that the KV pool holds.
    output_bytes: capacity of the cache of encoder outputs.
    max_running, max_in_flight, max_step_tokens, pace, block_size: as the engine's settings.
    """

    cost: CostModel
    kv_tokens: int
    output_bytes: int
    max_running: int
    max_in_flight: int
    max_step_tokens: int
    pace: float
    block_size: int

    @classmethod
    def of(cls, config: EngineConfig, cost: CostModel) -> Self:
        """Return the abilities of an engine with these settings."""
        schedule = config.schedule
        return cls(
            cost=cost,
            kv_tokens=pool_tokens(config, cost),
            output_bytes=config.outputs.embed_cache_mib * MIB,
            max_running=schedule.max_running,
            max_in_flight=schedule.max_in_flight or 1 << 30,
            max_step_tokens=schedule.max_step_tokens,
            pace=schedule.pace,
            block_size=config.kv.block_size,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way through the fleet.

    conversation, image: keys; image is "" if it has none.
    system, visual, history, text, output: tokens: the common prompt, the image, all of the conversation so
        far (0 for its first question, otherwise system prompt and image included), the question, the answer.
    arrival: when the client sent it. first, last: times of its first and last token; infinite before.
    fresh: whether an image was encoded for it.
    cached: tokens of its prompt that a prefix cache had.
    pictures: equal parts of the image, each of which is encoded by itself.
    """

    conversation: str
    image: str
    system: int
    visual: int
    history: int
    text: int
    output: int
    arrival: float
    first: float = math.inf
    last: float = math.inf
    fresh: bool = False
    cached: int = 0
    pictures: int = 1
    left: int = field(default=0, init=False)
    taken: int = field(default=0, init=False)
    work_s: float = field(default=0.0, init=False)

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return (self.history or self.system + self.visual) + self.text


class Lru:
    """A cache of things with sizes: the least recently used ones go when there is no room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def touch(self, key: str) -> None:
        """Note a use of a key that is there."""
        self._sizes.move_to_end(key)

    def put(self, key: str, size: int) -> None:
        """Add a key, or give it another size. One that is larger than the whole cache is not kept."""
        self.used += size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        self.shrink(self.capacity)

    def shrink(self, capacity: int) -> None:
        """Remove keys until the rest fits; later ones have to fit, too."""
        self.capacity = capacity
        while self.used > capacity:
            self.used -= self._sizes.popitem(last=False)[1]


class Holdings:
    """The keys of images that a replica holds, as its events would tell: encoder outputs or prefixes."""

    def __init__(self, outputs: Lru, prefixes: Lru) -> None:
        self._outputs, self._prefixes = outputs, prefixes

    def __contains__(self, key: object) -> bool:
        return key in self._outputs or key in self._prefixes

    def __len__(self) -> int:
        return len(self._outputs) + len(self._prefixes)


@dataclass(slots=True)
class _Image:
    """An image that is being encoded: seconds that are left, and the requests that wait for it."""

    key: str
    visual: int
    left_s: float
    holders: list[Request]


@dataclass(slots=True)
class _Stretch:
    """Steps that only decode: the k-th of them, from 0 on, takes first_s + k * growth_s seconds."""

    began: float
    first_s: float
    growth_s: float

    def end(self, steps: int) -> float:
        """Return the time after so many steps."""
        return self.began + steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def steps_until(self, now: float) -> int:
        """Return after how many steps it is `now` or later; at least one."""
        seconds = now - self.began
        steps = seconds / self.first_s
        if self.growth_s > 0:
            b = self.first_s - self.growth_s / 2
            steps = (math.sqrt(b * b + 2 * self.growth_s * seconds) - b) / self.growth_s
        whole = max(1, math.ceil(steps - 1e-9))
        return whole if self.end(whole) >= now else whole + 1


class Replica:
    """A simulated engine. It has no clock: `wake_at` tells when it wants to be woken.

    name: its name. draining: whether it takes no new requests. alive: whether it still runs.
    wake_at: end of the step, or of the decodes, that run now; infinite if it is idle.
    version: changes with `wake_at`.
    in_flight: requests that it has accepted and not ended.
    encoded: images that it has encoded; encode_s: seconds of that.
    busy_s: seconds in which it computed.
    prompt_tokens, cached_tokens: of all prompts that have begun.
    """

    def __init__(self, spec: ReplicaSpec, name: str) -> None:
        self.spec, self.name = spec, name
        self.draining, self.alive = False, True
        self.wake_at, self.version = math.inf, 0
        self.prefixes = Lru(spec.kv_tokens)
        self.outputs = Lru(spec.output_bytes)
        self.holdings = Holdings(self.outputs, self.prefixes)
        self.unfinished: set[Request] = set()
        self.encoded, self.encode_s, self.busy_s = 0, 0.0, 0.0
        self.prompt_tokens = self.cached_tokens = 0
        self.queued_s = 0.0
        self._ready: deque[Request] = deque()
        self._images: OrderedDict[str, _Image] = OrderedDict()
        self._prompts: list[Request] = []
        self._computing: set[str] = set()
        self._decoding: list[tuple[int, int, Request]] = []
        self._joined = 0
        self._steps = 0
        self._context = 0
        self._taken = 0
        self._waiting = 0
        self._stretch: _Stretch | None = None
        self._planned = 0
        self._chunks: list[tuple[Request, int]] = []

    @property
    def in_flight(self) -> int:
        return len(self.unfinished)

    def accepts(self, request: Request) -> bool:
        """Whether there is room in the queue, and the request can ever fit."""
        fits = request.prompt + request.output <= min(self.spec.kv_tokens, self.spec.cost.max_context)
        return fits and self.alive and not self.draining and len(self.unfinished) < self.spec.max_in_flight

    def lacks_image(self, request: Request) -> bool:
        """Whether the encoder output of the request's image is needed, and not cached."""
        image = request.image
        return bool(image) and image not in self.prefixes and image not in self.outputs

    def submit(self, request: Request, now: float, *, ready: bool = True) -> None:
        """Accept a request. ready: whether it may be scheduled; otherwise `make_ready` tells when."""
        self.unfinished.add(request)
        if ready:
            self._place(request)
            self._notice(now)

    def make_ready(self, request: Request, now: float) -> None:
        """The output of an image was handed over by an encoder; the request may be scheduled."""
        if request in self.unfinished:
            self.outputs.put(request.image, request.visual * self.spec.cost.visual_token_bytes)
            self._place(request)
            self._notice(now)

    def wake(self, now: float) -> tuple[list[Request], list[Request]]:
        """End the steps that end now, and begin the next ones.

        Returns the requests that got their first token, and those that ended.
        """
        began, ended = self._end_steps(now)
        self._begin(now)
        return began, ended

    def kill(self) -> list[Request]:
        """End at once. Returns the requests that were not ended."""
        lost = sorted(self.unfinished, key=lambda one: (one.arrival, one.conversation))
        self.unfinished.clear()
        self.alive, self.wake_at, self.version = False, math.inf, self.version + 1
        return lost

    def signals(self, now: float, good: float | None) -> Signals:
        """Return the state by which the fleet is scaled."""
        waiting = [one.arrival for one in self.unfinished if one.first == math.inf]
        oldest = now - min(waiting) if waiting else 0.0
        return Signals(self.queued_s, oldest, len(self.unfinished), good, float(self.spec.max_running))

    def _place(self, request: Request) -> None:
        """Put a request among those that can join, or have its image encoded first."""
        cost, cached = self.spec.cost, self._cached(request)
        missing = request.prompt - cached
        request.work_s = missing * cost.token_s + pairs_of(cached, missing) * cost.pair_s + cost.chunk_s
        if not self.lacks_image(request):
            if request.image in self.outputs:
                self.outputs.touch(request.image)
            self._ready.append(request)
        elif request.image in self._images:
            self._images[request.image].holders.append(request)
        else:
            seconds = request.pictures * cost.image(-(-request.visual // request.pictures))
            request.work_s += seconds
            request.fresh = True
            self._images[request.image] = _Image(request.image, request.visual, seconds, [request])
        self.queued_s += request.work_s
        self._waiting += 1

    def _cached(self, request: Request) -> int:
        """Return the tokens of the prompt that the prefix cache has, in whole blocks."""
        prefixes = self.prefixes
        found = request.system if SYSTEM in prefixes else 0
        if request.image:
            if request.image not in prefixes:
                return found // self.spec.block_size * self.spec.block_size
            found = request.system + request.visual
        if request.history and request.conversation in prefixes:
            found = request.history - 1
        return min(found, request.prompt - 1) // self.spec.block_size * self.spec.block_size

    def _notice(self, now: float) -> None:
        """A request has come: begin if nothing runs, or let it join after the step that runs now."""
        if self.wake_at == math.inf:
            self._begin(now)
        elif self._stretch is not None:
            steps = self._stretch.steps_until(now)
            if steps < self._planned:
                self._planned = steps
                self._sleep_until(self._stretch.end(steps))

    def _sleep_until(self, at: float) -> None:
        self.wake_at = at
        self.version += 1

    def _begin(self, now: float) -> None:
        """Begin the next step, or the next steps that only decode."""
        self._stretch = None
        if (self._ready or self._prompts or self._images) and self._begin_step(now):
            return
        if self._decoding:
            self._begin_stretch(now)
        else:
            self._sleep_until(math.inf)

    def _begin_stretch(self, now: float) -> None:
        """Decode until a sequence ends. Nothing else can advance before: no place or memory becomes free."""
        self._planned = self._decoding[0][0] - self._steps
        first = self._decode_s(self._context)
        last = self._decode_s(self._context + (self._planned - 1) * len(self._decoding))
        growth = (last - first) / (self._planned - 1) if self._planned > 1 else 0.0
        self._stretch = _Stretch(now, first, growth)
        self._sleep_until(self._stretch.end(self._planned))

    def _decode_s(self, context: int) -> float:
        """Seconds from a step that only decodes to the next one."""
        cost = self.spec.cost
        return cost.step(Composition(len(self._decoding), context)) + cost.between_s

    def _begin_step(self, now: float) -> bool:
        """Divide the time of a step: decodes first, then prompts and images as in `schedule.itl_limit`.

        Returns False if neither a prompt nor an image can advance.
        """
        spec, decodes = self.spec, len(self._decoding)
        alone, longest = 0.0, IDLE_STEP_S
        prompt_s = 2 * IDLE_STEP_S
        if decodes:
            crowd = max(1.0, (self._waiting - 1) / max(1.0, decodes / FREE_BATCH))
            alone = self._decode_s(self._context)
            longest = spec.pace * crowd**CROWDING * alone if spec.pace else math.inf
            prompt_s = longest - alone
            if self._images:
                prompt_s /= 2
        made_of = self._take_prompts(alone + prompt_s)
        if not self._chunks and not self._images:
            return False
        self._planned = 1
        seconds = spec.cost.step(made_of)
        if self._images:
            seconds += self._encode(longest - seconds)
        self._sleep_until(now + seconds + spec.cost.between_s)
        self.busy_s += seconds
        return True

    def _take_prompts(self, seconds: float) -> Composition:
        """Choose the tokens of prompts for a step of at most so many seconds. Returns the whole step."""
        decodes, spec = len(self._decoding), self.spec
        room = spec.max_step_tokens - decodes
        tokens = chunks = pairs = 0
        self._chunks = []
        joining = deque[Request]()
        queue = [*self._prompts]
        looked = 0
        while room > 0:
            if queue:
                request = queue.pop(0)
            elif (joins := self._next_to_join(joining)) is not None and looked < LOOKAHEAD:
                looked += 1
                request = joins
            else:
                break
            start = request.prompt - request.left
            fits = self._fitting(seconds, Composition(decodes, self._context, tokens, chunks, pairs), start)
            if not tokens:
                fits = max(fits, FEWEST_TOKENS)
            count = min(request.left, fits, room)
            if count < min(request.left, FEWEST_TOKENS):
                break
            self._chunks.append((request, count))
            tokens, chunks, room = tokens + count, chunks + 1, room - count
            pairs += pairs_of(start, count)
        self._ready.extendleft(reversed(joining))
        return Composition(decodes, self._context, tokens, chunks, pairs)

    def _next_to_join(self, passed: deque[Request]) -> Request | None:
        """Let the next waiting request join. Those whose prefix is just being computed go to `passed`."""
        while self._ready:
            request = self._ready[0]
            need = request.prompt + request.output
            full = len(self._prompts) + len(self._decoding) >= self.spec.max_running
            if full or (self._taken + need > self.spec.kv_tokens and self._taken):
                return None
            self._ready.popleft()
            if request.image and request.image in self._computing and request.image not in self.prefixes:
                passed.append(request)
                continue
            self._join(request)
            return request
        return None

    def _join(self, request: Request) -> None:
        cached = self._cached(request)
        for key in (
            request.conversation,
            request.image,
            SYSTEM,
        ):  # a prefix is older than what begins with it
            if key in self.prefixes:
                self.prefixes.touch(key)
        request.cached, request.left = cached, request.prompt - cached
        request.taken = request.left + request.output
        self._taken += request.taken
        self.prefixes.shrink(max(0, self.spec.kv_tokens - self._taken))
        self.prompt_tokens += request.prompt
        self.cached_tokens += cached
        self._prompts.append(request)
        if request.image:
            self._computing.add(request.image)

    def _fitting(self, seconds: float, step: Composition, start: int) -> int:
        """Return how many more tokens of a prompt, after `start` of its own, fit into a step."""
        cost = self.spec.cost
        if seconds == math.inf:
            return self.spec.max_step_tokens
        room = seconds - cost.between_s - cost.step_s - step.decodes * cost.decode_s
        room -= (step.chunks + 1) * cost.chunk_s
        memory = cost.read_s + cost.expert_s + step.decode_context * cost.context_s
        if cost.overlap == 1:
            arithmetic = room - memory
        else:
            arithmetic = (
                room * (1 - (memory / room) ** cost.overlap) ** (1 / cost.overlap) if room > memory else 0
            )
        arithmetic -= step.decodes * cost.row_s + step.prompt_tokens * cost.token_s + step.pairs * cost.pair_s
        if arithmetic <= 0:
            return 0
        each = cost.token_s + start * cost.pair_s
        if not cost.pair_s:
            return int(min(1e9, arithmetic / each)) if each else 1 << 30
        return int((math.sqrt(each * each + 2 * cost.pair_s * arithmetic) - each) / cost.pair_s)

    def _encode(self, seconds: float) -> float:
        """Encode images for so long, but at least one slice. Returns the seconds that it takes."""
        left = max(seconds, self.spec.cost.slice_s)
        taken = 0.0
        for image in self._images.values():
            part = min(image.left_s, left - taken)
            image.left_s -= part
            taken += part
            if taken >= left:
                break
        self.encode_s += taken
        return taken

    def _end_steps(self, now: float) -> tuple[list[Request], list[Request]]:
        """Take in the steps that end now."""
        at, began, ended = now - self.spec.cost.between_s, list[Request](), list[Request]()
        if self._stretch is not None:
            self.busy_s += now - self._stretch.began - self._planned * self.spec.cost.between_s
        if self._decoding:
            self._steps += self._planned
            self._context += self._planned * len(self._decoding)
            while self._decoding and self._decoding[0][0] <= self._steps:
                request = heapq.heappop(self._decoding)[2]
                self._context -= request.prompt + request.output
                self._finish(request, at, ended)
        for request, count in self._chunks:
            request.left -= count
            if not request.left:
                self._begin_answer(request, at, began, ended)
        self._chunks = []
        while self._images and (image := next(iter(self._images.values()))).left_s <= 1e-12:
            del self._images[image.key]
            self.encoded += 1
            self.outputs.put(image.key, image.visual * self.spec.cost.visual_token_bytes)
            self._ready.extend(image.holders)
        return began, ended

    def _begin_answer(self, request: Request, at: float, began: list[Request], ended: list[Request]) -> None:
        """The prompt of a request is computed: it has its first token, and others can use its prefix."""
        request.first = at
        began.append(request)
        self.queued_s = max(0.0, self.queued_s - request.work_s)
        self._prompts.remove(request)
        self._waiting -= 1
        if request.image:
            self._computing.discard(request.image)
            self.prefixes.put(request.image, request.visual)
        if request.system:
            self.prefixes.put(SYSTEM, request.system)
        if request.output == 1:
            self._finish(request, at, ended)
            return
        self._joined += 1
        heapq.heappush(self._decoding, (self._steps + request.output - 1, self._joined, request))
        self._context += request.prompt + 1

    def _finish(self, request: Request, at: float, ended: list[Request]) -> None:
        request.last = at
        ended.append(request)
        self.unfinished.discard(request)
        self._taken -= request.taken
        self.prefixes.capacity = max(0, self.spec.kv_tokens - self._taken)
        own = request.prompt + request.output - request.system - request.visual
        self.prefixes.put(request.conversation, own)
        for key in (request.image, SYSTEM):
            if key in self.prefixes:
                self.prefixes.touch(key)
