"""Turns step plans into tensors. No other module does this.

The runner owns the data that the scheduler only counts: the KV tensor, the pixels that wait for the encoder,
the positions of each prompt. It does not decide which sequence goes next.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fovea.core.errors import OutOfMemory
from fovea.core.measure import NO_SPAN, active_recorder, stage
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.execute.attention_plan import DecoderPlanner, by_length, image_rows
from fovea.engine.execute.block_moves import BlockMoves, move_streams
from fovea.engine.execute.decode_rows import DecodeRows, PaddedDecodes, only_decodes
from fovea.engine.execute.device_memory import free_unused, is_out_of_memory
from fovea.engine.execute.encode_queue import EncodeQueue, EncodeResult
from fovea.engine.execute.kept_rows import KeptRows, decisions
from fovea.engine.execute.layer_drafter import LayerDrafter
from fovea.engine.execute.model_drafter import ModelDrafter
from fovea.engine.job import SequenceInputs
from fovea.engine.layers.draft import DraftLayer
from fovea.engine.layers.step import DecoderMemory, DecoderPlan, Taps
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.sample.logits import prompt_rows, score_prompt
from fovea.engine.sample.sampler import Pending, Sampler
from fovea.engine.schedule.decode_batches import Padding
from fovea.engine.schedule.plan import EncodeJob, StepPlan, Work
from fovea.engine.sequence import Drafts, ImageSpan, Sequence
from fovea.engine.speculate.speculator import DraftRequest, Speculator
from fovea.engine.step.executor import StepOutOfMemory, StepResult
from fovea.engine.step.positions import mrope_positions, place, plain_positions
from fovea.engine.tiers import SlowerTiers
from fovea.engine.vision.encoding import Slices, UpcomingImages, VisualFeatures, encoder_stream
from fovea.engine.vision.graphs import BlockGraphs
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.kernels.pages import KVFormat
from fovea.kernels.transfer import row_index, to_device

T = TypeVar("T")
Visual = tuple[Tensor | None, Tensor | None, list[Tensor]]
"""The visual rows of a step, their embeddings, and DeepStack's additions for these rows."""
NO_VISUAL: Visual = None, None, []
States = tuple[list[Work], Tensor]
"""The rows of a step, and the states between layers that were read at taps, (rows, n)."""
log = logging.getLogger("fovea.engine")


class Runner:
    """Computes step plans with a model: the executor of the real engine (`step.executor.Executor`).

    memory: the KV pool, and the slots of states.
    moves: KV blocks in host memory, and the copies of blocks.
    kept: the rows that sequences keep which do not keep all.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        embeddings: EmbeddingCache[VisualFeatures],
        sampler: Sampler,
        *,
        blocks: int,
        window_blocks: int = 0,
        block_size: int,
        host_blocks: int = 0,
        state_slots: int = 0,
        slower: SlowerTiers | None = None,
        padding: Padding | None = None,
        encoder_graphs: bool = False,
        encode: Callable[[ProcessedImage, UpcomingImages], Slices[VisualFeatures]] | None = None,
        kv_format: KVFormat | None = None,
        speculator: Speculator | None = None,
        draft_layer: DraftLayer | None = None,
        draft_model: VisionLanguageModel | None = None,
    ) -> None:
        """blocks, block_size: size of the KV pool.

        window_blocks: blocks of the pool of layers with a sliding window, for models that have any.
        host_blocks: KV blocks in host memory.
        state_slots: slots for states, for models that have any.
        slower: slower tiers for encoder outputs; None: none.
        padding: padding of steps that only decode, recorded as CUDA graphs on CUDA; None: no padding.
        encoder_graphs: record the blocks of the encoder as CUDA graphs, if the kernels allow it.
        encode: returns the slices of an image by its plan; None: the model's own method, with all tokens.
        kv_format: format of keys and values in 8 bits; None: they have the model's type.
        speculator: knows the drafters; None: there are none.
        draft_layer, draft_model: they compute drafts; None: there is none.
        """
        self.model = model
        self._speculator = speculator
        self.embeddings = embeddings
        self.sampler = sampler
        self.block_size = block_size
        self.slower = slower or SlowerTiers()
        config = model.decoder.config
        scrap = padding is not None  # one more block and slot take the KV and states of padding rows
        device, dtype = model.device, model.dtype
        pools = (blocks + scrap, window_blocks + scrap)[: len(config.kv_groups)]
        slots = state_slots + (scrap and config.stateful)
        self.memory = DecoderMemory.allocate(config, pools, block_size, slots, dtype, device, kv_format)
        self._ranks = model.ranks
        self._ranks.announce("allocate", pools, block_size, slots, dtype, kv_format, host_blocks)
        self.kept = KeptRows(config, self.memory, self._ranks)
        self.moves = BlockMoves(self.memory.kv, host_blocks, move_streams(device), self.kept.compact)
        self._prompts: dict[str, PromptArrays] = {}
        self._encoder = EncodeQueue(
            encode or (lambda image, ahead: model.encode_slices(image)),
            encoder_stream(model.device),
            pixels=self._pixels,
            alive=self._prompts.__contains__,
            graphs=BlockGraphs() if encoder_graphs and model.kernels.spans_in_one_launch else None,
        )
        self._cross = config.cross_attention
        self._rows = DecodeRows(
            block_size,
            0 if model.merge is None else 3,
            lambda seq_id: self._prompts[seq_id].delta,
            [group.window for group in config.kv_groups],
        )
        self._planner = DecoderPlanner(model.kernels, config, block_size, device, dtype)
        self._layer: LayerDrafter | None = None
        if draft_layer is not None and speculator is not None:
            self._layer = LayerDrafter(draft_layer, pools[0], block_size, self._positions, host_blocks)
            speculator.use(self._layer)
        if draft_model is not None and speculator is not None:
            vocabulary = config.vocab_size
            speculator.use(ModelDrafter(draft_model, pools[0], block_size, vocabulary, self._positions))
        self._padded: PaddedDecodes | None = None
        self.pad_decodes(padding)

    def pad_decodes(self, padding: Padding | None) -> None:
        """Pad steps that only decode, from now on. On CUDA the batches are recorded now. None: no change."""
        if padding is not None:
            capture = self.model.device.type == "cuda" and not padding.launch_only
            self._padded = PaddedDecodes(padding, self._decode, self.model.device, capture=capture)

    @property
    def block_bytes(self) -> int:
        """Size of one KV block, all layers together; of layers with a sliding window, of one block, too."""
        return sum(pool.block_bytes for pool in self.memory.kv)

    @property
    def speculates(self) -> bool:
        """Whether there are drafters, and none of them has failed."""
        return self._speculator is not None

    @property
    def encoding(self) -> bool:
        """Whether an image is partly encoded."""
        return self._encoder.working

    @property
    def slice_s(self) -> float:
        """Seconds of the slowest recent slice of an image; 0 before the first one."""
        return self._encoder.slice_s

    def add(self, seq: Sequence, inputs: SequenceInputs) -> Drafts:
        """Store a sequence's prompt, positions and pixel sources.

        Returns the tokens with which its answer is expected to begin.

        Features that were read from slower tiers move into the encoder-output cache, as far as they fit
        beside the held outputs. The others stay with the sequence, reserved like pixels, until the scheduler
        plans their image.
        """
        ids = np.asarray(seq.prompt_ids, dtype=np.int64)
        merge = self.model.merge
        if merge is None:
            positions, delta = plain_positions(len(ids), seq.spans)
        else:
            positions, delta = mrope_positions(len(ids), seq.spans, merge)
        visual = (
            np.cumsum(self.model.visual(ids), dtype=np.int64) if seq.spans else np.zeros(0, dtype=np.int64)
        )
        self._prompts[seq.id] = PromptArrays(ids, positions, delta, visual, inputs, seq.spans)
        forced = self.sampler.add(seq, inputs.choice, inputs.grammar, inputs.bad_words, inputs.grammar_after)
        if self._speculator is not None:
            self._safely(partial(self._speculator.add, seq, inputs), None)
        for key in list(inputs.features):
            self._restore(key, (seq.id,), self.embeddings.capacity)
        return forced

    def remove(self, seq: Sequence) -> None:
        self._prompts.pop(seq.id, None)
        if self.kept.forget(seq.id):
            self._ranks.announce("forget", seq.id)
        self.sampler.remove(seq)
        if self._speculator is not None:
            self._safely(partial(self._speculator.remove, seq), None)
        if not self._prompts:  # no further step would drop the images
            self._encoder.drop()

    @property
    def runs_ahead(self) -> bool:
        """Whether `follow` is worth while: on a device that computes while the host does something else."""
        return self.model.device.type == "cuda"

    def execute(self, plan: StepPlan, encode_s: float = math.inf) -> StepResult:
        """Compute the plan's tokens, and encode its images for about `encode_s` seconds.

        Raises StepOutOfMemory after everything was freed that can be computed again.
        """
        return self.finish(self.launch(plan, encode_s))

    def launch(self, plan: StepPlan, encode_s: float = math.inf) -> LaunchedStep:
        """Begin to compute a plan, see `execute`. On CUDA its tokens are only waited for in `finish`."""
        return self._guarded(lambda: self._launch(plan, encode_s), plan)

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Wait for the tokens of a step. Returns its result. Raises StepOutOfMemory."""
        return self._guarded(launched.finish, launched.plan)

    def follow(self, launched: LaunchedStep, plan: StepPlan) -> LaunchedStep | None:
        """Begin to compute the next token of sequences whose newest one a launched step is choosing.

        plan: from `Scheduler.follow`. The tokens stay on the device.
        Returns None if a token may still change on the host, or is needed there. Raises StepOutOfMemory.
        """
        return self._guarded(lambda: self._follow(launched, plan), plan)

    @torch.inference_mode()
    def _follow(self, launched: LaunchedStep, plan: StepPlan) -> LaunchedStep | None:
        places = launched.places(plan.work)
        if places is None or not all(self.sampler.runs_ahead(item.seq) for item in plan.work):
            return None
        ids, work = launched.tokens, by_length(plan.work)
        order = [places[item.seq.id] for item in work]
        if order != list(range(len(ids))):
            ids = ids[row_index(order, ids.device)]
        with forward_stage(work):
            hidden, tapped = self._forward(work, list(range(len(work))), ids)
        return self._sample(hidden, work, StepResult(), plan, self._states(work, tapped), ahead=True)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, encode_s: float) -> LaunchedStep:
        result = StepResult()
        if plan.moves:
            self._ranks.announce("move", plan.moves)
            self.moves.run(plan.moves)
            if self._layer is not None:
                self._safely(partial(self._layer.move, plan.moves), None)
        self._encode(plan, encode_s, result)
        launched = self._compute(plan, result)
        if plan.encode and encode_s >= 0:
            self._take(plan, self._encoder.encode_alone(self._free_memory), result)
        return launched

    def _guarded(self, work: Callable[[], T], plan: StepPlan) -> T:
        """Do a part of a step. If it does not fit into memory, free what can be computed again."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Only now the error is gone, and with it the tensors of the failed step.
        if len(plan.work) <= 1:
            self._encoder.restart()
            self.embeddings.clear()
        self._free_memory()
        raise StepOutOfMemory(reason)

    def _compute(self, plan: StepPlan, result: StepResult) -> LaunchedStep:
        """Begin to compute the plan's tokens."""
        items = plan.work
        if result.failures:
            items = tuple(item for item in items if item.seq.id not in result.failures)
        work = by_length(
            [piece for item in items for piece in ((item,) if item.count == 1 else item.split())]
        )
        if not work:
            return LaunchedStep(plan, result)
        ends = [end - 1 for end in accumulate(item.count for item in work)]
        sampled = [(end, item) for end, item in zip(ends, work, strict=True) if item.samples]
        rows = [end for end, _ in sampled]
        scored = [
            (item, place, end - item.stop + 1 + place)
            for end, item in zip(ends, work, strict=True)
            if item.seq.scores_prompt
            and not item.seq.output_ids  # later they are computed again only for keys
            for place in prompt_rows(item)
        ]
        with forward_stage(work):
            hidden, tapped = self._forward_parts(work, rows + [row for _, _, row in scored])
        states = self._states(work, tapped)
        if scored:
            hidden, of_prompts = hidden[: len(rows)], hidden[len(rows) :]
            with stage("head", rows=len(scored)):
                self._score_prompts([(item, place) for item, place, _ in scored], of_prompts, result)
        if not rows:
            return LaunchedStep(plan, result, finish=lambda: self._propose(states, []))
        return self._sample(hidden, [item for _, item in sampled], result, plan, states)

    def _states(self, work: list[Work], tapped: Tensor | None) -> States | None:
        """Return the rows of a step with what taps read, which later steps leave; None: nothing was read."""
        return None if tapped is None else (work, tapped.clone() if self._padded is not None else tapped)

    def _propose(self, states: States | None, got: Seq[tuple[Sequence, list[int]]]) -> Mapping[str, Drafts]:
        """Return drafts for sequences that got tokens in a step.

        states: rows of the step with what taps read. got: sequences and their new tokens.
        """
        speculator, layer = self._speculator, self._layer
        if speculator is None:
            return {}

        def propose() -> Mapping[str, Drafts]:
            if layer is not None and states is not None and not layer.resting:
                new = {seq.id: tokens for seq, tokens in got}
                layer.note(*states, new, keep=speculator.worthwhile)
            return speculator.propose([DraftRequest(*each) for each in got])

        return self._safely(propose, {})

    def _safely(self, work: Callable[[], T], otherwise: T) -> T:
        """Do something for drafts. They only save time: if it fails, the engine goes on without speculation.

        otherwise: what is returned then.
        """
        try:
            return work()
        except Exception:
            log.exception("drafts failed; from now on there is no speculation")
            self._speculator = self._layer = None
            return otherwise

    def _positions(self, seq: Sequence, start: int, stop: int) -> NDArray[np.int64]:
        return self._prompts[seq.id].positions_of(start, stop)

    def _sample(
        self,
        hidden: Tensor,
        work: list[Work],
        result: StepResult,
        plan: StepPlan,
        states: States | None = None,
        *,
        ahead: bool = False,
    ) -> LaunchedStep:
        """Begin to choose the tokens after states (len(work), hidden)."""
        rows = [(item.seq, 0 if ahead else item.draft) for item in work]
        with stage("head", rows=len(rows)):  # sampling is the stage of `finish`, which each step has once
            logits = self._logits(hidden)
            propose = None if self._speculator is None else partial(self._propose, states)
            pending = self.sampler.launch(logits, rows, ahead=ahead, propose=propose)
        return LaunchedStep(plan, result, pending, rows)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits after states (rows, hidden). Few rows are padded like the steps that only decode."""
        count = len(hidden)
        least = 0 if self._padded is None else self._padded.padding.sizes[0]
        if count >= least:
            return self.model.logits(hidden)
        return self.model.logits(functional.pad(hidden, (0, 0, 0, least - count)))[:count]

    @torch.inference_mode()
    def late(self) -> StepResult | None:
        """Return the tokens that were held back in earlier steps and are ready; None: there are none."""
        return self.sampler.late()

    def _score_prompts(self, places: list[tuple[Work, int]], hidden: Tensor, result: StepResult) -> None:
        """Compute the log probabilities of tokens of prompts.

        places: work and position before each token. hidden: the states there.
        """
        for item in dict.fromkeys(item for item, _ in places):
            rows = [row for row, (of, _) in enumerate(places) if of is item]
            after = [places[row][1] + 1 for row in rows]
            ids = [item.seq.prompt_ids[place] for place in after]
            most = item.seq.sampling.prompt_logprobs or 0
            result.prompts[item.seq.id] = score_prompt(hidden[rows], after, ids, most, self.model.logits)

    @property
    def image_memory_retries(self) -> int:
        """Number of images that were encoded again alone, for lack of memory."""
        return self._encoder.memory_retries

    def _encode(self, plan: StepPlan, seconds: float, result: StepResult) -> None:
        jobs = [job for job in plan.encode if not self._restore(job.span.key, job.holders)]
        self._take(plan, self._encoder.step(jobs, seconds, alone=not plan.work), result)

    def _take(self, plan: StepPlan, encoding: EncodeResult, result: StepResult) -> None:
        """Take in the images that were encoded, and the errors of others."""
        result.encode_s += encoding.seconds
        for job in plan.encode:
            failure = encoding.failures.get(job.span.key)
            if failure is not None:
                result.failures.update({name: self._named(failure, name, job) for name in job.holders})
        for key, image in encoding.images.items():
            features = image.features
            self.embeddings.put(key, features, features.nbytes, image.holders, features.created_at)
            self.slower.add_encoded(key, features)
            result.encoded[key] = image.seconds
            if image.projected is not None:
                result.projected[key] = image.projected

    def _named(self, error: Exception, holder: str, job: EncodeJob) -> Exception:
        """Name the image in an error about memory by its place in the holder's prompt."""
        if not isinstance(error, OutOfMemory):
            return error
        places = (span.index for span in self._prompts[holder].spans if span.key == job.span.key)
        return OutOfMemory(f"image {next(places, 0)}: {error.message}")

    def _free_memory(self) -> None:
        free_unused(self.model.device)

    def _restore(self, key: str, holders: Seq[str], within: int | None = None) -> bool:
        """Move features that one of the holders has into the encoder-output cache, held for all holders.

        within: limit of the held bytes.
        Returns False if no holder has the features, or if they do not fit.
        """
        owner = next((holder for holder in holders if key in self._prompts[holder].inputs.features), None)
        # A client may leave at any time, and another thread then clears its features.
        features = None if owner is None else self._prompts[owner].inputs.features.get(key)
        if owner is None or features is None:
            return False
        for holder in holders:
            if not self.embeddings.restore(
                key, features, features.nbytes, holder, features.created_at, within
            ):
                return False
        self._prompts[owner].inputs.features.pop(key, None)
        return True

    def _pixels(self, job: EncodeJob) -> ProcessedImage:
        return self._prompts[job.holders[0]].inputs.pixels[job.span.key]()

    def _forward_parts(self, work: list[Work], rows: list[int]) -> tuple[Tensor, Tensor | None]:
        """Compute a step as `_forward` does. With several stages, each computes another part at a time."""
        if self._ranks.stages == 1:
            return self._forward(work, rows)
        firsts = dict(zip(map(id, work), accumulate((item.count for item in work), initial=0), strict=False))
        results: list[Tensor] = []
        taken: list[Tensor] = []
        places: list[int] = []  # of the results in `rows`
        numbers: list[int] = []  # of the computed rows in the step
        for part in parts_of(work, self._ranks.stages):
            part = by_length(part)
            own = [firsts[id(item)] + row for item in part for row in range(item.count)]
            found = {row: place for place, row in enumerate(own)}
            wanted = [place for place, row in enumerate(rows) if row in found]
            hidden, tapped = self._forward(part, [found[rows[place]] for place in wanted], whole=False)
            results.append(hidden)
            taken += [] if tapped is None else [tapped]
            places += wanted
            numbers += own
        self._ranks.settle()
        return in_order(results, places), in_order(taken, numbers) if taken else None

    def _forward(
        self, work: list[Work], rows: list[int], on_device: Tensor | None = None, *, whole: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a step. Returns the hidden states of `rows`, (len(rows), hidden), and what taps read.

        on_device: (len(work),), the tokens of a step that only decodes; None: the host knows them.
        whole: it is a whole step, not a part of one.
        """
        device = self.model.device
        deciding = decisions(work)
        decodes = self._rows.update(work) if whole and only_decodes(work) and not deciding else None
        if decodes is not None:
            if self._padded is not None and (size := self._padded.padding.batch(decodes)):
                return self._padded.run(size, decodes, on_device)
            ids, positions = decodes.ids, decodes.positions
            visual_rows, embeds, deepstack = NO_VISUAL
        else:
            prompts = [(self._prompts[item.seq.id], item) for item in work]
            ids = np.concatenate([prompt.ids_of(item) for prompt, item in prompts])
            visual_rows, embeds, deepstack = self._visual(work)
            positions = np.concatenate(
                [prompt.positions_of(item.start, item.stop) for prompt, item in prompts], axis=-1
            )
        tokens = to_device(torch.from_numpy(ids), device) if on_device is None else on_device
        watch = self.kept.watch(deciding)
        taps = self._taps()
        x = self.model.decoder.embed(tokens)
        if visual_rows is not None and embeds is not None:
            x = x.index_copy(0, visual_rows, embeds.to(x.dtype))
        hidden: Tensor = self.model.decoder(
            x,
            to_device(torch.from_numpy(positions), device),
            self.memory,
            self._planner.plan(work, rows, decodes),
            visual_rows,
            deepstack,
            None if rows == list(range(len(ids))) else row_index(rows, device),
            self.model.decoder.layer_embeddings(tokens, x, visual_rows),
            image_rows(work, self._image_states) if self._cross is not None else (),
            watch,
            taps,
        )
        if deciding:
            self._ranks.announce("choose", deciding)
            self.kept.choose(deciding, watch)
        return hidden, None if taps is None else taps.joined

    def _taps(self) -> Taps | None:
        return None if self._layer is None or self._layer.resting else Taps(self._layer.layer.taps)

    def _image_states(self, span: ImageSpan) -> tuple[Tensor, ...]:
        """Keys and values of an image for each layer with cross-attention, see `ImageRows`."""
        assert self._cross is not None
        shape = span.rows, 2, self._cross.kv_heads, self._cross.head_dim
        return tuple(tensor.view(shape) for tensor in self.embeddings.get(span.key).tensors)

    def _decode(self, ids: Tensor, positions: Tensor, plan: DecoderPlan) -> tuple[Tensor, Tensor | None]:
        decoder, taps = self.model.decoder, self._taps()
        x = decoder.embed(ids)
        own = decoder.layer_embeddings(ids, x, None)
        hidden: Tensor = decoder(x, positions, self.memory, plan, per_layer=own, taps=taps)
        return hidden, None if taps is None else taps.joined

    def _visual(self, work: list[Work]) -> Visual:
        """Return the visual part of a step. The tokens of reduced images get their positions here."""
        rows: list[NDArray[np.int64]] = []
        parts: list[tuple[VisualFeatures, slice]] = []
        base = 0
        for item in work:
            prompt = self._prompts[item.seq.id]
            for span in item.seq.spans_between(item.start, item.stop):
                first, last = max(span.start, item.start), min(span.end, item.stop)
                places = np.nonzero(self.model.visual(prompt.ids[first:last]))[0]
                if not len(places):
                    continue
                before = int(prompt.visual[span.start]) - 1
                begin = int(prompt.visual[first + places[0]]) - 1 - before
                rows.append(places + (base + first - item.start))
                features = self.embeddings.get(span.key)
                prompt.place(span, features)
                parts.append((features, slice(begin, begin + len(places))))
            base += item.count
        if not rows:
            return NO_VISUAL
        index = to_device(torch.from_numpy(np.concatenate(rows)), self.model.device)
        embeds = torch.cat([features.embeds[where] for features, where in parts])
        levels = len(parts[0][0].deepstack)
        deepstack = [torch.cat([f.deepstack[level][where] for f, where in parts]) for level in range(levels)]
        return index, embeds, deepstack


class LaunchedStep:
    """A step whose tokens are being chosen.

    plan: its plan.
    """

    def __init__(
        self,
        plan: StepPlan,
        result: StepResult,
        pending: Pending | None = None,
        rows: Seq[tuple[Sequence, int]] = (),
        finish: Callable[[], object] | None = None,
    ) -> None:
        """result: what is known of the result already.

        rows: sequence of each row of the pending tokens, and number of drafts before it.
        finish: to be called at the end of a step without tokens; None: nothing.
        """
        self.plan = plan
        self._result = result
        self._pending = pending
        self._rows = rows
        self._finish = finish

    @property
    def tokens(self) -> Tensor:
        """The tokens of the rows, on the device. There must be some."""
        assert self._pending is not None
        return self._pending.tokens

    def places(self, work: Seq[Work]) -> dict[str, int] | None:
        """Return the row of each sequence; None: a token of one of them may still change on the host."""
        if self._pending is None or self._result.failures:
            return None
        final = zip(self._rows, self._pending.final, strict=True)
        places = {seq.id: row for row, ((seq, drafts), sure) in enumerate(final) if sure and not drafts}
        return places if all(item.seq.id in places for item in work) else None

    @torch.inference_mode()
    def finish(self) -> StepResult:
        """Wait for the tokens. Returns the result of the step."""
        if self._pending is not None:
            with stage("sampling", rows=len(self._rows)):
                self._pending.finish(self._result)
        elif self._finish is not None:
            self._finish()
        return self._result


def in_order(parts: Seq[Tensor], numbers: list[int]) -> Tensor:
    """Join the rows of parts, and put them in the order of their numbers."""
    rows = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if numbers == sorted(numbers):
        return rows
    return rows[torch.tensor(numbers, device=rows.device).argsort()]


def parts_of(work: Seq[Work], count: int) -> list[list[Work]]:
    """Divide the work of a step into up to `count` parts of about as many rows each.

    All work of a sequence is in one part, so a long chunk is a part by itself.
    """
    sequences: dict[str, list[Work]] = {}
    for item in work:
        sequences.setdefault(item.seq.id, []).append(item)
    rows = sum(item.count for item in work)
    parts: list[list[Work]] = [[]]
    filled = 0
    for items in sequences.values():
        own = sum(item.count for item in items)
        # The next part begins where the middle of this sequence is beyond the end of the part.
        if parts[-1] and len(parts) < count and filled + own / 2 > rows * len(parts) / count:
            parts.append([])
        parts[-1] += items
        filled += own
    return parts


def forward_stage(work: Seq[Work]) -> AbstractContextManager[None]:
    """Return the stage of a step: "decode step", "prefill", or "mixed step" if it has both.

    Its notes are: rows, the tokens computed; keys, the positions whose KV is read, counted once per sequence;
    pairs, the pairs of a query and a key that it attends to.
    """
    if active_recorder() is None:
        return NO_SPAN
    decodes = sum(item.seq.decoding for item in work)
    name = "decode step" if decodes == len(work) else "mixed step" if decodes else "prefill"
    return stage(
        name,
        rows=sum(item.count for item in work),
        keys=sum(item.stop for item in work),
        pairs=sum(item.count * (item.start + 1 + item.stop) // 2 for item in work),
    )


@dataclass(slots=True)
class PromptArrays:
    """The prompt of one sequence.

    ids: (P,) token ids.
    positions: (3, P) with M-RoPE, else (P,).
    delta: offset from the index of a token after the prompt to its position.
    visual: (P,) number of visual tokens up to and including each index; empty without images.
    inputs: pixel sources and restored features.
    spans: the images.
    positioned: starts of the spans of reduced images whose tokens have their own positions.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    delta: int
    visual: NDArray[np.int64]
    inputs: SequenceInputs
    spans: Seq[ImageSpan] = ()
    positioned: set[int] = field(default_factory=set)

    def ids_of(self, item: Work) -> NDArray[np.int64]:
        """Token ids of a step's work, (count,)."""
        if item.stop <= len(self.ids):
            return self.ids[item.start : item.stop]
        return np.asarray(item.seq.tokens(item.start, item.stop), dtype=np.int64)

    def positions_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Positions of the tokens in [start, stop), (3, count) with M-RoPE, else (count,)."""
        length = len(self.ids)
        known = self.positions[..., start : min(stop, length)]
        if stop <= length:
            return known
        later = np.arange(max(start, length), stop) + self.delta
        if known.ndim == 2:
            later = np.broadcast_to(later, (3, len(later)))
        return np.concatenate((known, later), axis=-1)

    def place(self, span: ImageSpan, features: VisualFeatures) -> None:
        """Give the tokens of a reduced image their own positions, once its encoder output tells them."""
        if not span.full_tokens or span.start in self.positioned:
            return
        assert features.places is not None
        place(self.positions, span, features.places.cpu().numpy().astype(np.int64))
        self.positioned.add(span.start)
