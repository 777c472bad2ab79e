"""Counts of visual tokens by the rules of known models, without a checkpoint. It must not import torch.

    known.json      settings of published models that decide the number of tokens
    known           reads that file
    rule            counts with an image processor, and remembers sizes
    find            builds the rule of a name or a folder

`tools/known_models.py` writes known.json from the facts of `tests/published`.
"""

from __future__ import annotations

from fovea.engine.vision.token_rules.find import folder_rule, known_rule, rule_for
from fovea.engine.vision.token_rules.known import known_models
from fovea.engine.vision.token_rules.rule import ProcessorRule

__all__ = ["ProcessorRule", "folder_rule", "known_models", "known_rule", "rule_for"]
