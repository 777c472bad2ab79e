"""How many sequences with a sliding window are admitted."""

from __future__ import annotations

from fovea.core.sampling import SamplingParams
from fovea.engine.kv.blocks import GONE, BlockPool, WindowBlocks
from fovea.engine.kv.manager import KVManager
from fovea.engine.sequence import Sequence

SIZE, WINDOW, STEP = 4, 16, 32


def test_a_computed_sequence_reserves_its_window_and_no_room_for_a_prompt() -> None:
    """Every computed sequence reserved room for the steps of its prompt: 3 were admitted instead of 8."""
    window = WindowBlocks(BlockPool(48), SIZE, WINDOW, STEP)
    kv = KVManager(BlockPool(1000), SIZE, window=window)
    admitted: list[Sequence] = []
    while len(admitted) < 20:
        name = len(admitted)
        seq = Sequence(f"s{name}", [name] * 100, SamplingParams(temperature=0.0), 1)
        if not kv.can_admit(seq, kv.match(seq)):
            break
        kv.admit(seq, kv.match(seq))
        while seq.computed_tokens < seq.length:
            count = min(STEP, seq.length - seq.computed_tokens)
            assert kv.can_extend(seq, seq.computed_tokens + count), "admitted without room for its prompt"
            kv.extend(seq, seq.computed_tokens + count)
            kv.commit(seq, count, seq.length)
        admitted.append(seq)
    kv.check_integrity()
    held = [sum(block != GONE for block in seq.window_blocks) for seq in admitted]
    # A prompt uses at most 13 blocks, (16 + 32 + 4) / 4. Its window afterwards has 4,
    # or 5 beside the border of a block.
    assert window.blocks_at_once(100, 100) == 13
    assert max(held) <= 5
    assert len(admitted) == 8
