"""Speculation: drafts of an answer's next tokens, which the model verifies several at a time.

Drafts change no answer. A step computes a row for the newest token and one for each draft, exactly as single
steps would, and the sampler chooses after each row what it would have chosen anyway. `texts` finds drafts in
texts, `prompt`, `hints` and `answers` decide in which; `layer` and `model` compute them. `speculator` chooses
between them by their measured acceptance. `schedule.draft_budget` decides how many are worth their rows.
"""
