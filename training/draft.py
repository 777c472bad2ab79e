"""Trains the EAGLE-3 draft layer of fovea-tiny, which guesses the next tokens before the model computes them.

    python draft.py --batches 1000                        # train, measure, write to the assets folder
    python draft.py --batches 0 --start FOLDER            # only measure the weights of a folder

The draft layer reads the residual stream of the frozen model at the inputs of three of its layers. Row i of
the draft pairs this feature of position i with the embedding of token i + 1, and predicts token i + 2. To
guess one token further, the next row takes the output of the row before it in place of the feature, because
the model has not seen that position yet. Training unrolls the same steps ("training-time test" in the paper).
The target of each row is the model's own distribution, so that no labels are needed.

Method: Li, Wei, Zhang, Zhang: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025. The weights have the names of published EAGLE-3 checkpoints. There is no reduced
vocabulary and no output matrix: the draft shares the model's table of embeddings.

One process draws batches and computes their features; another trains on each of them `uses` times.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from batches import fit_image, questions, random_system, scene_batch, text_batch, tool_batch
from common import ASSETS
from dense import dense_targets, stack_dense
from evaluate import held_out_batches
from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.questions import reading
from fovea.evaluation.scenes.scene import CODE_CHARACTERS
from fovea.evaluation.scenes.small import compose_small
from model import Fovea, TextMLP, rotate
from muon import Muon
from packing import Batch, Packer, PromptMedia, Size, branches, collate
from several import still_batch
from train import Settings as TrainSettings
from train import large_size, parts_batch, several_batch, small_size
from varied import Tower, tower

Tensors = dict[str, Tensor]
AUX_LAYERS = (2, 3, 4)
"""The target's layers whose inputs are the features."""
INTERMEDIATE, DRAFTS = 512, 3
"""Width of the MLP; tokens guessed in one step."""
STEP_DECAY, LOOK, SMALL_SCORES = 0.8, 0.3, 1e-3
"""Weights in the loss: of each further guess, of attention to printed characters, and of large scores."""


@dataclass
class Settings:
    """The command-line options.

    batches: batches of new images; 0: measure only.
    uses: how often each batch is used.
    held: batches that are held for their further uses.
    rate, adam_rate: learning rates of Muon and of Adam.
    warmup: steps until the full rate.
    decay_from: share of the steps after which the rate decays.
    images: images of a batch of small images.
    average: decay of the averaged weights per step. They are measured and written.
    samples: held-out samples of each kind.
    seed: of the run; below 1_000_000_000.
    start: folder with weights to begin with; empty: random weights.
    out: folder for config.json and model.safetensors.
    """

    batches: int = 1000
    uses: int = 3
    held: int = 40
    rate: float = 4e-3
    adam_rate: float = 2e-3
    warmup: int = 60
    decay_from: float = 0.3
    images: int = 24
    average: float = 0.98
    samples: int = 48
    seed: int = 1
    start: str = ""
    out: str = str(ASSETS / "eagle3")


class DraftAttention(nn.Module):
    """The projections of the draft's attention. Its inputs are an embedding beside a feature."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.size = config["hidden_size"], config["head_dim"]
        self.kv_heads = config["num_key_value_heads"]
        self.groups = config["num_attention_heads"] // self.kv_heads
        self.q_proj = nn.Linear(2 * hidden, self.groups * self.kv_heads * self.size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.groups * self.kv_heads * self.size, hidden, bias=False)

    def keys(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, kv_heads, N, head_dim) of rows x (B, N, 2 * hidden)."""
        k, v = (
            project(x).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
            for project in (self.k_proj, self.v_proj)
        )
        return rotate(k, *rope).to(v.dtype), v

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Scaled queries (B, kv_heads, groups, N, head_dim) of rows x (B, N, 2 * hidden)."""
        flat = self.q_proj(x)
        q = flat.unflatten(-1, (-1, self.size)).transpose(1, 2)
        q = rotate(q, *rope) * self.size**-0.5
        return q.to(flat.dtype).unflatten(1, (self.kv_heads, self.groups))


class DraftLayer(nn.Module):
    """The draft's only layer. `Draft.forward` computes its attention, because it knows the unrolled steps."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = TextMLP(config | {"intermediate_size": INTERMEDIATE})

    def pair(self, embeddings: Tensor, features: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), dim=-1)

    def finish(self, features: Tensor, attended: Tensor) -> Tensor:
        """The output of rows, from their features and the result of their attention, each (B, N, hidden)."""
        x = features + self.self_attn.o_proj(attended).float()
        return x + self.mlp(self.post_attention_layernorm(x)).float()


class Guess(NamedTuple):
    """The result of one step for all rows.

    logits: (B, R, vocabulary).
    scores: attention scores, (B, heads, R, L + steps before). The heads of one key are neighbours.
    """

    logits: Tensor
    scores: Tensor


class Draft(nn.Module):
    """The draft layer with the frozen model's table of embeddings. Parameters have their exported names."""

    def __init__(self, target: Fovea) -> None:
        super().__init__()
        self.text_config = config = target.config["text_config"]
        hidden = config["hidden_size"]
        text = target.model["language_model"]
        self.fc = nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.rope = text.rope
        self.register_buffer("embeddings", text.embed_tokens.weight.detach().clone(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)
        with torch.no_grad():  # at the start, the feature is mostly the latest of the three
            self.fc.weight.mul_(0.1)[:, -hidden:].add_(torch.eye(hidden))
            self.norm.weight.copy_(text.norm.weight)

    def forward(self, batch: Tensors, steps: int) -> list[Guess]:
        """The guesses of each step for the rows that `features` names. They are valid where chain >= step.

        Only keys and values are computed of all rows; the rest is computed of the rows with a loss. In step
        s, row i sees the rows up to i - s as step 0 made them, and behind these one row of each step from 1
        to s, up to itself. The rows of one chain are neighbours, so both are shifts along R.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        features, rows = self.fc(batch["features"]).float(), batch["rows"]
        embeddings = self.embeddings[batch["following"]]
        cos, sin = self.rope(batch["positions"])
        keys, values = attention.keys(layer.pair(embeddings, features), (cos, sin))
        mask = visible(batch["segment"], rows)
        count = torch.arange(len(rows), device=rows.device)[:, None]
        x, embeddings = features[count, rows], embeddings[count, rows]
        rope = cos[count, 0, rows][:, None], sin[count, 0, rows][:, None]
        later: list[tuple[Tensor, Tensor]] = []
        guesses = []
        for step in range(steps):
            pair = layer.pair(embeddings, x)
            if step:
                later.append(attention.keys(pair, rope))
            q = attention.queries(pair, rope)
            own = [tuple(t.roll(step - 1 - at, 2) for t in pair) for at, pair in enumerate(later)]
            attended, scores = attend_chain(q, keys, values, mask.roll(step, 1), own)
            x = layer.finish(x, attended)
            guesses.append(Guess(F.linear(self.norm(x), self.embeddings).float(), scores.flatten(1, 2)))
            x = x.roll(1, 1)
        return guesses


def attend_chain(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Attention of rows to all rows of step 0 that `mask` allows, and to rows of their own chains.

    q: (B, kv_heads, groups, R, head_dim). keys, values: (B, kv_heads, L, head_dim). mask: (B, R, L).
    own: for each later step, the key and the value that each row sees, (B, kv_heads, R, head_dim).
    Returns (B, R, heads * head_dim), and the scores (B, kv_heads, groups, R, L + len(own)).
    """
    scores = (q.flatten(2, 3) @ keys.mT).unflatten(2, q.shape[2:4])
    scores = scores.float().masked_fill(~mask[:, None, None], float("-inf"))
    chain = [(q * k[:, :, None]).sum(-1, keepdim=True).float() for k, _ in own]
    scores = torch.cat([scores, *chain], dim=-1)
    weights, length = scores.softmax(-1).to(values.dtype), keys.shape[2]
    result = (weights[..., :length].flatten(2, 3) @ values).unflatten(2, q.shape[2:4])
    for at, (_, v) in enumerate(own):
        result = result + weights[..., length + at, None] * v[:, :, None]
    return result.permute(0, 3, 1, 2, 4).flatten(2), scores


def visible(segment: Tensor, rows: Tensor) -> Tensor:
    """The positions that each of the rows attends to, (B, R, L): its branch, and the prefix before it.

    segment: (B, L), see `packing.Sequence`. rows: (B, R).
    """
    own = segment.gather(1, rows)[..., None]
    before = torch.arange(segment.shape[1], device=rows.device) <= rows[..., None]
    return before & ((segment[:, None] == own) | (segment[:, None] == 0))


def chains(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows with a loss in each sequence, and the place of each in its answer; -1 is padding. (B, R) each.

    The first row of an answer predicts its second token: the prefill of a prompt yields the first.

    targets: see `packing.collate`.
    """
    lines: list[list[tuple[int, int]]] = [[] for _ in range(int(targets[:, 0].max()) + 1)]
    place = 0
    for index, (row, state, _, group) in enumerate(targets):
        place = place + 1 if index and (row, group) == (targets[index - 1][0], targets[index - 1][3]) else 0
        if place:
            lines[row].append((state - 1, place - 1))
    rows = np.zeros((len(lines), max(map(len, lines))), np.int64)
    chain = np.full_like(rows, -1)
    for number, line in enumerate(lines):
        rows[number, : len(line)], chain[number, : len(line)] = zip(*line, strict=True)
    return rows, chain


def code_tokens(packer: Packer) -> Tensor:
    """The class of each token that is a character of codes, as in `dense.py`; 0 for other tokens."""
    classes = torch.zeros(packer.tokenizer.get_vocab_size(), dtype=torch.long)
    for number, character in enumerate(CODE_CHARACTERS):
        classes[packer.tokenizer.token_to_id(character)] = number + 1
    return classes


def printed(batch: Tensors, rows: Tensor, classes: Tensor) -> Tensor:
    """The visual tokens that show the character that each row predicts, at its place in a code; (B, R, L)."""
    tokens, ranks = batch["tokens"], batch["ranks"]
    kinds, place = classes[tokens], torch.zeros_like(tokens)
    for at in range(1, tokens.shape[1]):
        place[:, at] = torch.where(kinds[:, at - 1] > 0, place[:, at - 1] + 1, 0)
    shown = torch.zeros(tokens.numel(), ranks.shape[1], dtype=torch.long)
    shown[batch["slots"]] = ranks
    predicted = (rows + 2).clamp(max=tokens.shape[1] - 1)
    place = place.gather(1, predicted).clamp(max=ranks.shape[1] - 1)
    kinds = kinds.gather(1, predicted)[..., None]
    count = torch.arange(len(rows))[:, None]
    at_place = shown.view(*tokens.shape, -1).transpose(1, 2)[count, place]
    return (at_place == kinds) & (kinds > 0)


@torch.no_grad()
def features(target: Fovea, batch: Batch, classes: Tensor | None = None) -> Tensors:
    """The inputs and targets of the draft layer for one batch.

    features: (B, L, 3 * hidden), bf16. following: the next token of each position, (B, L). The last token of
        a prefix with several branches is followed by the first of them, also for the others.
    positions, segment: as in the batch.
    rows, chain: see `chains`.
    states: the target's last hidden states that predict the same token as the rows, (B, R, hidden).
    truth: that token in the true answer, (B, R).
    known: whether the target predicts the whole true answer, its first token included, (B, R).
    printed: see `printed`; only for batches with dense targets.
    classes: see `code_tokens`; None: without `printed`.
    """
    tensors = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in batch.items()}
    taken: list[Tensor] = []
    layers = target.model["language_model"].layers
    hooks = [
        layers[index].register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0].bfloat16()))
        for index in AUX_LAYERS
    ]
    with torch.autocast(tensors["tokens"].device.type, torch.bfloat16):
        states = target.hidden(tensors)[0]
        row, state, token, group = tensors["targets"].unbind(1)
        right = target.logits(states[row, state]).argmax(-1) == token
    for hook in hooks:
        hook.remove()
    key = row * 1024 + group
    wrong = key[~right].unique()
    known = torch.zeros(tensors["tokens"].shape, dtype=torch.bool)
    known[row, state] = ~torch.isin(key, wrong)
    rows, chain = (torch.from_numpy(value) for value in chains(batch["targets"]))
    count, tokens = torch.arange(len(rows))[:, None], tensors["tokens"]
    seen = {}
    if classes is not None and "ranks" in tensors and len(tensors["ranks"]) == len(tensors["slots"]):
        seen["printed"] = printed(tensors, rows, classes)
    return seen | {
        "features": torch.cat(taken, dim=-1),
        "following": tokens.roll(-1, 1),
        "positions": tensors["positions"],
        "segment": tensors["segment"],
        "rows": rows,
        "chain": chain,
        "states": states[count, rows + 1].bfloat16(),
        "truth": tokens.gather(1, (rows + 2).clamp(max=tokens.shape[1] - 1)),
        "known": known[count, rows + 1],
    }


def loss(draft: Draft, batch: Tensors) -> Tensor:
    """Cross-entropy to the target's distribution. An answer of n tokens has the weight of sqrt(n).

    The characters of a code are printed in few visual tokens, which a single layer finds late by itself. So a
    second loss leads the first head of each key there, as far as the generator of the images knows the place.
    A third keeps scores small. Queries and keys have no norms, and without it scores grew to 300: then
    a head sees one row, and learns no other.
    """
    chain, groups = batch["chain"], draft.midlayer.self_attn.groups
    with torch.no_grad():
        goal = F.linear(batch["states"].float(), draft.embeddings).softmax(-1)
        weight = answer_lengths(chain).float().clamp(min=1) ** -0.5
    total = torch.zeros(())
    for step, guess in enumerate(draft(batch, DRAFTS)):
        each = -(goal * guess.logits.log_softmax(-1)).sum(-1)
        each = each + SMALL_SCORES * guess.scores.logsumexp(-1).square().mean(1)
        if "printed" in batch:
            some = batch["printed"].any(-1) & (chain >= step)
            share = log_share(guess.scores[:, ::groups].transpose(1, 2)[some], batch["printed"][some])
            each = each.index_put(some.nonzero(as_tuple=True), -LOOK * share, accumulate=True)
        total = total + STEP_DECAY**step * (each * weight * (chain >= step)).sum()
    return total / (weight * (chain >= 0)).sum()


def log_share(scores: Tensor, there: Tensor) -> Tensor:
    """The logarithm of the share of attention that falls on some positions, (N,), as a mean over heads.

    scores: (N, heads, L or more). there: (N, L).
    """
    inside = scores[..., : there.shape[1]].masked_fill(~there[:, None], float("-inf"))
    return (inside.logsumexp(-1) - scores.logsumexp(-1)).mean(1)


def answer_lengths(chain: Tensor) -> Tensor:
    """The number of rows in the answer of each row, (B, R)."""
    lengths = chain.clone() + 1
    for at in range(chain.shape[1] - 2, -1, -1):
        same = chain[:, at + 1] == chain[:, at] + 1
        lengths[:, at] = torch.where(same & (chain[:, at] >= 0), lengths[:, at + 1], lengths[:, at])
    return lengths


def label_batch(rng: Random, packer: Packer, size: Size, count: int) -> Batch:
    """`count` single images of one size, most of them with texts, which are asked for more often."""
    system, sequences, pictures, dense = random_system(rng), [], [], []
    while len(sequences) < count:
        if min(size) >= 448 and rng.random() < 0.4:
            scene = compose_small(rng, *size)
        else:
            scene = compose(rng, *size, labels=rng.choice((0, 1, 1, 1, 2, 3)))
        turns = [*questions(rng, scene, 5), *(reading(rng, scene) for _ in range(4))]
        distinct = list({turn.question: turn for turn in turns if turn}.values())
        if distinct:
            sequences.append(branches(packer, distinct, PromptMedia((size[1] // 32, size[0] // 32)), system))
            pictures.append([fit_image(draw(scene), size)])
            dense.append(dense_targets(scene, size))
    return collate(sequences, pictures) | stack_dense(dense)


def any_batch(rng: Random, packer: Packer, images: int, embeds: Tower) -> Batch:
    """A batch of one of the kinds that the model was trained on."""
    kind = rng.choices(
        ("labels", "large", "talk", "still", "several", "tool", "parts", "text"),
        (10, 2, 1.5, 0.7, 2, 4, 1, 0.3),
    )[0]
    size = large_size(rng) if kind == "large" or kind == "tool" and rng.random() < 0.2 else small_size(rng)
    count = max(1, min(images, 1500 * 1024 // (size[0] * size[1])))
    if kind == "talk":
        return scene_batch(rng, packer, size, count, 4, True)
    if kind == "still":
        return still_batch(rng, packer, size, count // 2, 8)
    if kind == "several":
        return several_batch(rng, packer, TrainSettings(several=images // 2))
    if kind == "tool":
        return tool_batch(rng, packer, size, count)
    if kind == "parts":
        return parts_batch(rng, packer, TrainSettings(varied=images // 2), embeds)
    if kind == "text":
        return text_batch(rng, packer, 16)
    return label_batch(rng, packer, size, count)


def load_target() -> Fovea:
    """The model with the weights in the assets folder, in float32."""
    model = Fovea(json.loads((ASSETS / "config.json").read_text())).eval()
    weights = load_file(ASSETS / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    return model


def produce(queue: mp.Queue, settings: Settings) -> None:
    """Put the features of all batches of a run into the queue."""
    torch.set_num_threads(1)
    packer, embeds, target = Packer(str(ASSETS / "tokenizer.json")), tower(), load_target()
    classes = code_tokens(packer)
    for number in range(settings.batches):
        rng = Random(f"{settings.seed}/draft/{number}")
        queue.put(features(target, any_batch(rng, packer, settings.images, embeds), classes))
    time.sleep(86400)  # the tensors in the queue live as long as this process, which the trainer ends


def train(draft: Draft, settings: Settings, batches: mp.Queue) -> Draft:
    """Train on each new batch at once, and on random earlier ones. Returns the draft with averaged weights.

    These are also written from time to time.
    """
    optimizer = Muon(draft, momentum=0.95, betas=(0.9, 0.98), decay=0.5, matrices=("midlayer", "fc."))
    parameters = list(draft.parameters())
    averaged = copy.deepcopy(draft).requires_grad_(False)
    rng, held, running = Random(settings.seed), list[Tensors](), 0.0
    steps = settings.batches * settings.uses
    for step in range(steps):
        if step % settings.uses == 0:
            batch = batches.get()
            held = [*held[-settings.held + 1 :], batch]
        else:
            batch = rng.choice(held)
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(draft, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.others, 1.0)
        left = (1 - step / steps) / (1 - settings.decay_from)
        factor = min(1.0, (step + 1) / settings.warmup, left)
        optimizer.step(settings.rate * factor, settings.adam_rate * factor)
        average = min(settings.average, 1 - 1 / (step + 2))
        torch._foreach_lerp_(list(averaged.parameters()), [p.detach() for p in parameters], 1 - average)
        running += (float(value.detach()) - running) * max(0.02, 1 / (step + 1))
        if step % 30 == 29:
            line = {"step": step + 1, "loss": round(running, 4), "seconds": round(time.process_time())}
            print(json.dumps(line), flush=True)
        if step % 300 == 299 or step == steps - 1:
            export(averaged, Path(settings.out))
    return averaged


def measure(draft: Draft, batches: list[Tensors]) -> Counter[str]:
    """Simulate greedy decoding of the answers that the target gives, with DRAFTS guesses in each step.

    tokens, steps: tokens after the first of each answer, and steps of the target to make them.
    least: steps if every guess were right.
    answers: answers that are `known`. Others are left out.
    drafted1, right1, ...: how often a token is guessed in that place of a step, and is right with all before.
    """
    counts: Counter[str] = Counter()
    for batch in batches:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            guesses = draft(batch, DRAFTS)
        hits = [(guess.logits.argmax(-1) == batch["truth"]).tolist() for guess in guesses]
        lengths = answer_lengths(batch["chain"])
        starts = ((batch["chain"] == 0) & batch["known"]).nonzero().tolist()
        for row, start in starts:
            counts["answers"] += 1
            counts.update(decode([step[row] for step in hits], start, start + int(lengths[row, start])))
    return counts


def decode(hits: list[list[bool]], at: int, end: int) -> Counter[str]:
    """The counts of `measure` for one answer: rows `at` to `end`. hits: of each step, for all rows."""
    length = end - at
    counts = Counter(tokens=length, steps=0, least=-(-length // (DRAFTS + 1)))
    while at < end:
        counts["steps"] += 1
        accepted = 0
        for guess in range(min(DRAFTS, end - at)):
            counts[f"drafted{guess + 1}"] += 1
            if accepted == guess and hits[guess][at + guess]:
                accepted += 1
                counts[f"right{guess + 1}"] += 1
        at += accepted + 1
    return counts


def table(draft: Draft, held_out: dict[str, list[Tensors]]) -> str:
    """The measurements of each kind as a table in Markdown."""
    by_kind = {kind: measure(draft, batches) for kind, batches in held_out.items()}
    by_kind["all"] = sum(by_kind.values(), Counter())
    lines = [
        "| kind | answers | tokens per step | at most | draft 1 | draft 2 | draft 3 |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, c in by_kind.items():
        rates = [
            f"{100 * c[f'right{n}'] / max(1, c[f'drafted{n}']):.0f} %" if c[f"drafted{n}"] else "-"
            for n in range(1, DRAFTS + 1)
        ]
        speed, most = c["tokens"] / max(1, c["steps"]), c["tokens"] / max(1, c["least"])
        lines.append(f"| {kind} | {c['answers']} | {speed:.2f} | {most:.2f} | {' | '.join(rates)} |")
    return "\n".join(lines)


def export(draft: Draft, folder: Path) -> None:
    """Write model.safetensors in bf16, and config.json."""
    text_config = draft.text_config
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": text_config["hidden_size"],
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": text_config["num_attention_heads"],
        "num_key_value_heads": text_config["num_key_value_heads"],
        "head_dim": text_config["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": text_config["rms_norm_eps"],
        "rope_theta": text_config["rope_theta"],
        "max_position_embeddings": text_config["max_position_embeddings"],
        "vocab_size": text_config["vocab_size"],
        "draft_vocab_size": text_config["vocab_size"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "rope_scaling": {
            key: value for key, value in text_config["rope_parameters"].items() if key != "rope_theta"
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous() for name, value in draft.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in asdict(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    settings = Settings(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    target = load_target()
    draft = Draft(target)
    if settings.start:
        weights = load_file(Path(settings.start) / "model.safetensors")
        draft.load_state_dict({name: value.float() for name, value in weights.items()})
    if settings.batches:
        context = mp.get_context("spawn")
        queue = context.Queue(maxsize=4)
        worker = context.Process(target=produce, args=(queue, settings), daemon=True)
        worker.start()
        draft = train(draft, settings, queue)
        worker.terminate()
    packer = Packer(str(ASSETS / "tokenizer.json"))
    batches = held_out_batches(packer, settings.samples)
    held_out = {kind: [features(target, batch) for batch in some] for kind, some in batches.items()}
    for batch in held_out["form"]:  # the schema of the request decides between keys; the target alone cannot
        batch["known"].fill_(True)
    print(table(draft, held_out), flush=True)


if __name__ == "__main__":
    main()
