"""Drafts by a smaller model with the same tokenizer.

It has KV blocks of its own. It computes a prompt with the second token of the answer, so that the first one
is not later, and then every token of the answer, and its own drafts. Where a draft was refused, its keys and
values are overwritten.

Images cost a draft model more than they bring, so it sees a shorter form of them: its tower's tokens, of
which the mean of some neighbours is one token, or no image at all. Which form drafts best is measured, as
the elastic compressor of SpecVLM (arXiv 2509.11815) learns it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.core.errors import FoveaError, UnsupportedModel
from fovea.engine.execute.attention_plan import DecoderPlanner, by_length
from fovea.engine.execute.layer_drafter import LEAST_CHANCE, Positions
from fovea.engine.job import SequenceInputs
from fovea.engine.layers.config import Attention
from fovea.engine.layers.draft import most_likely
from fovea.engine.layers.step import DecoderMemory
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.speculator import DraftRequest
from fovea.engine.speculate.texts import Continuation
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.kernels.transfer import row_index, to_device

MOST_ROWS = 1024
"""Rows of prompts that are computed in one step. A longer prompt gets no drafts until its last step."""
FORMS = (0, 16, 4)
"""Tokens of an image that become one, for each form of an image; 0: the draft model sees no image."""
TRIALS = 3
"""Number of answers with images for which each form is tried before the best one is taken."""
WEIGHT = 0.05
"""Weight of a new answer in the average of a form."""


def check_draft_model(model: VisionLanguageModel) -> None:
    """Raise UnsupportedModel if a model cannot draft: its layers must all see all tokens, and no states."""
    config = model.decoder.config
    plain = all(isinstance(layer.mixer, Attention) and layer.mixer.window is None for layer in config.layers)
    if not plain or config.whole_images:
        raise UnsupportedModel(
            "a draft model needs layers with attention to all tokens; this one has windows, states, "
            "cross-attention, or images whose tokens see each other"
        )


@dataclass(slots=True, eq=False)
class _Shadow:
    """A sequence as the draft model sees it.

    form: see FORMS; None: there are no images, or none can be seen.
    own: the sequence for the planner. Its prompt has a token for each row, and its blocks are of this pool.
        Its answer ends with drafts.
    positions: of the prompt's rows, as the target has them: (rows,) or (3, rows).
    images: the first row of each image, and its embeddings (rows, hidden).
    answer: tokens of the answer, without drafts.
    drafts: the latest drafts after them.
    right, steps: drafts that were right, and steps, for the average of the form.
    """

    form: int | None
    own: Sequence
    positions: NDArray[np.int64]
    images: list[tuple[int, Tensor]]
    answer: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    right: int = 0
    steps: int = 0


class ModelDrafter:
    """A computed drafter, see `speculator.DeviceDrafter`.

    model: the draft model. Its kernels and type may differ from the target's.
    least_chance: see LEAST_CHANCE.
    """

    name = "model"
    least_chance = LEAST_CHANCE
    resting = False

    def __init__(
        self, model: VisionLanguageModel, blocks: int, block_size: int, vocabulary: int, positions: Positions
    ) -> None:
        """blocks, block_size: of the pool. vocabulary: number of the target's tokens."""
        self.model = model
        self.free = list(range(blocks))
        self._size, self._vocabulary, self._positions = block_size, vocabulary, positions
        config = model.decoder.config
        self._rows_of_table = config.vocab_size + config.extra_embeddings
        self._planner = DecoderPlanner(model.kernels, config, block_size, model.device, model.dtype)
        self._memory = DecoderMemory.allocate(config, (blocks,), block_size, 0, model.dtype, model.device)
        self._inputs: dict[str, SequenceInputs] = {}
        self._pixels: dict[str, dict[str, ProcessedImage]] = {}
        self._shadows: dict[str, _Shadow] = {}
        self._forms = {form: [0, 0.0] for form in FORMS}

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        self._inputs[seq.id] = inputs

    def remove(self, seq: Sequence) -> None:
        self._inputs.pop(seq.id, None)
        self._pixels.pop(seq.id, None)
        shadow = self._shadows.pop(seq.id, None)
        if shadow is not None:
            self.free += shadow.own.blocks
            self._judge(shadow)

    @torch.inference_mode()
    def draft(self, asked: Seq[DraftRequest], most: int) -> dict[str, Continuation]:
        """Return up to `most` drafts of each sequence, by its id.

        A sequence whose first token is new, or for which no blocks are free, gets none.
        """
        found: dict[str, Continuation] = {}
        work: list[Work] = []
        room = MOST_ROWS
        for seq, new in asked:
            if not seq.output_ids:
                self._hold_pixels(seq)
                continue
            shadow = self._shadow(seq)
            self._go_back(shadow, [*seq.output_ids, *new])
            missing = len(shadow.own.prompt_ids) + len(shadow.own.output_ids) - shadow.own.computed_tokens
            count = min(missing, max(room, 1) if missing == 1 else room)
            if count <= 0 or not self._extend(shadow.own, shadow.own.computed_tokens + count):
                continue
            room -= count
            work.append(Work(shadow.own, shadow.own.computed_tokens, count))
            if count == missing:
                found[seq.id] = Continuation([], [], 0)
        if work:
            self._chain(by_length(work), found, most)
        return found

    def _chain(self, work: list[Work], found: dict[str, Continuation], most: int) -> None:
        """Compute the missing rows of sequences, and then one row for each further draft."""
        alive = dict.fromkeys(found, 1.0)
        while work:
            for item in work:
                item.seq.computed_tokens = item.stop
            ends = np.cumsum([item.count for item in work]) - 1
            ready = [(int(row), item) for row, item in zip(ends, work, strict=True) if item.seq.id in alive]
            hidden = self._compute(work, [row for row, _ in ready])
            if not ready:
                return
            logits = self.model.logits(hidden)[:, : self._vocabulary]
            tokens, chances = (values.tolist() for values in most_likely(logits))
            work = []
            for (_, item), token, chance in zip(ready, tokens, chances, strict=True):
                own, drafts = item.seq, found[item.seq.id]
                drafts.tokens.append(token)
                drafts.shares.append(chance)
                alive[own.id] *= chance
                self._shadows[own.id].drafts.append(token)
                likely = len(drafts.tokens) < most and alive[own.id] >= self.least_chance
                if likely and self._extend(own, own.length + 1):
                    own.append([token])
                    work.append(Work(own, own.length - 1, 1))

    def _compute(self, work: list[Work], rows: list[int]) -> Tensor:
        device, decoder = self.model.device, self.model.decoder
        ids = np.concatenate([item.seq.tokens(item.start, item.stop) for item in work])
        ids[ids >= self._rows_of_table] = 0  # a token that only the target has
        positions = np.concatenate([self._places(item) for item in work], axis=-1)
        tokens = to_device(torch.from_numpy(ids.astype(np.int64)), device)
        x = decoder.embed(tokens)
        first = 0
        for item in work:
            for start, rows_of_image in self._shadows[item.seq.id].images:
                begin, end = max(start, item.start), min(start + len(rows_of_image), item.stop)
                if begin < end:
                    place = first - item.start
                    x[place + begin : place + end] = rows_of_image[begin - start : end - start]
            first += item.count
        return decoder(  # type: ignore[no-any-return]
            x,
            to_device(torch.from_numpy(positions), device),
            self._memory,
            self._planner.plan(work, rows),
            read=row_index(rows, device),
            per_layer=decoder.layer_embeddings(tokens, x, None),
        )

    def _places(self, item: Work) -> NDArray[np.int64]:
        """Positions of rows: of the prompt those of the target, which has more rows; later ones go on."""
        shadow = self._shadows[item.seq.id]
        count = len(shadow.own.prompt_ids)
        known = shadow.positions[..., item.start : min(item.stop, count)]
        if item.stop > count:
            beyond = np.arange(max(item.start, count), item.stop) - count + 1
            later = shadow.positions[..., -1:].max() + beyond
            if known.ndim == 2:
                later = np.broadcast_to(later, (len(known), len(later)))
            known = np.concatenate((known, later), axis=-1)
        if self.model.merge is None:
            return known if known.ndim == 1 else known[0]
        return known if known.ndim == 2 else np.broadcast_to(known, (3, len(known)))

    def _go_back(self, shadow: _Shadow, answer: list[int]) -> None:
        """Forget drafts that were refused, and take in the tokens that the answer has got."""
        own = shadow.own
        common = 0
        while common < min(len(own.output_ids), len(answer)) and own.output_ids[common] == answer[common]:
            common += 1
        latest = answer[len(shadow.answer) :]
        agreeing = takewhile(lambda pair: pair[0] == pair[1], zip(shadow.drafts, latest, strict=False))
        shadow.right += sum(1 for _ in agreeing)
        shadow.steps += 1
        shadow.answer, shadow.drafts = answer, []
        own.output_ids[:] = answer
        own.length = len(own.prompt_ids) + len(answer)
        # The newest token is computed again if it was a draft that the step did not verify.
        own.computed_tokens = min(own.computed_tokens, len(own.prompt_ids) + common, own.length - 1)

    def _extend(self, own: Sequence, rows: int) -> bool:
        needed = -(-rows // self._size) - len(own.blocks)
        if needed > len(self.free):
            return False
        if needed > 0:
            own.blocks += self.free[-needed:]
            del self.free[-needed:]
        return True

    def _shadow(self, seq: Sequence) -> _Shadow:
        """Return the sequence for the draft model, which is made when it is first needed."""
        known = self._shadows.get(seq.id)
        if known is not None:
            return known
        held = self._pixels.pop(seq.id, None)
        form = None if held is None else self._choose() if held else 0
        rows_of = {key: self._image(pixels, form) for key, pixels in held.items()} if held and form else {}
        ids: list[int] = []
        columns: list[NDArray[np.int64]] = []
        images: list[tuple[int, Tensor]] = []
        positions = self._positions(seq, 0, len(seq.prompt_ids))
        at = 0
        for span in seq.spans:
            ids += seq.prompt_ids[at : span.start]
            columns.append(positions[..., at : span.start])
            at = span.end
            rows = rows_of.get(span.key)
            if rows is not None:
                images.append((len(ids), rows))
                ids += [self.model.image_token_id or 0] * len(rows)
                places = np.linspace(span.start, span.end - 1, len(rows)).astype(np.int64)
                columns.append(positions[..., places])
        ids += seq.prompt_ids[at:]
        columns.append(positions[..., at:])
        own = Sequence(seq.id, ids, seq.sampling, seq.max_tokens)
        made = _Shadow(form, own, np.concatenate(columns, axis=-1), images)
        self._shadows[seq.id] = made
        return made

    def _hold_pixels(self, seq: Sequence) -> None:
        """Keep the pixels of a sequence's images for the next step. After its first token they are gone."""
        if self.model.image_token_id is not None and seq.spans:
            held = self._pixels[seq.id] = {}
            if not self._choose():
                return
            sources = self._inputs[seq.id].pixels
            for key in {span.key for span in seq.spans if not span.full_tokens}:
                source = sources.get(key)
                if source is not None:
                    with suppress(FoveaError):  # a client that has left, for example
                        held[key] = source()

    def _image(self, pixels: ProcessedImage, form: int) -> Tensor:
        """Return the draft model's tokens of an image, each the mean of some."""
        embeds = self.model.encode(pixels).embeds
        return torch.stack([part.float().mean(0) for part in torch.split(embeds, form)]).to(embeds.dtype)

    def _choose(self) -> int:
        """Return the form that is tried too seldom, or that drafts best."""
        for form, (count, _) in self._forms.items():
            if count < TRIALS:
                return form
        return max(self._forms, key=lambda form: self._forms[form][1])

    def _judge(self, shadow: _Shadow) -> None:
        if not shadow.steps or shadow.form is None:
            return
        values = self._forms[shadow.form]
        gain = shadow.right / shadow.steps
        values[1] = gain if not values[0] else values[1] + WEIGHT * (gain - values[1])
        values[0] += 1
