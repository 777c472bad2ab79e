"""How models write their reasoning and their tool calls in the text of an answer, and how that is read."""
