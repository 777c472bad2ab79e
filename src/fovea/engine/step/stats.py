"""The counters of steps and tokens, by the names of `observe.table`."""

from __future__ import annotations

from fovea.engine.step.loop import EngineLoop


def loop_stats(loop: EngineLoop) -> dict[str, float]:
    """Return the counters of steps and tokens. The real and the simulated engine both report them."""
    stepper = loop.stepper
    return {
        "images_encoded": stepper.encoded_images,
        "encode_seconds": stepper.encode_seconds,
        "engine_steps": stepper.steps,
        "failed_steps": loop.failed_steps,
        "computed_tokens": stepper.computed_tokens,
        "draft_tokens": stepper.draft_tokens,
        "accepted_draft_tokens": stepper.accepted_drafts,
        "generation_tokens": loop.board.generated_tokens,
        **stepper.control_stats(),
        "integrity_errors": loop.integrity_errors,
        **stepper.tallies.stats(),
    }
