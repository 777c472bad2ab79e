"""Run llama.cpp's converter with the right pre-tokenizer for our tokenizer, inside llama.cpp's venv.

    python convert_gguf.py CONVERTER ARGUMENTS...

The converter recognizes a pre-tokenizer by a hash of the tokens of one text, so it cannot recognize a new
vocabulary. Our tokenizer splits text as GPT-2 does.
"""

import runpy
import sys
from pathlib import Path

script = Path(sys.argv[1])
sys.path.insert(0, str(script.parent))
sys.path.insert(1, str(script.parent / "gguf-py"))

from conversion import ModelBase, base  # noqa: E402

for kind in (ModelBase, base.TextModel):
    if hasattr(kind, "get_vocab_base_pre"):
        kind.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = sys.argv[1:]
runpy.run_path(str(script), run_name="__main__")
