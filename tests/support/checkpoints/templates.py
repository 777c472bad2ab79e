"""Chat templates of tiny checkpoints."""

from __future__ import annotations

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGE_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{% endif %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}[IMG]{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% if m['role'] == 'user' %}[/INST]{% else %}<|im_end|>{% endif %}{% endfor %}"
)
# Like the published template: the images of a turn come before its text.
PADDLEOCR_TEMPLATE = (
    "<|begin_of_sentence|>{% for m in messages %}{% if m['role'] == 'user' %}User: "
    "{% for c in m['content'] if c['type'] == 'image' %}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    "{% endfor %}{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}"
    "{{ '\\n' }}{% elif m['role'] == 'assistant' %}Assistant: "
    "{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}{{ eos_token }}"
    "{% else %}{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] + '\\n' }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
INTERNVL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<IMG_CONTEXT>\n{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<start_of_image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
GLM_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif c['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA4_TEMPLATE = (
    "{% for m in messages %}<|turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|image|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
MINICPM_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{% if c['type'] == 'image' %}<|image_pad|>{% elif c['type'] == 'video' %}<|video_pad|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like the published template without its system message, which is only for prompts without images.
MLLAMA_TEMPLATE = (
    "<|begin_of_text|>{% for m in messages %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<|image|>{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATES = {
    "<image_soft_token>": GEMMA_TEMPLATE,
    "<|image_pad|>": QWEN_TEMPLATE,
    "<image>": IMAGE_TEMPLATE,
    "[IMG]": MISTRAL_TEMPLATE,
    "<|IMAGE_PLACEHOLDER|>": PADDLEOCR_TEMPLATE,
    "<|image|>": GLM_TEMPLATE,
    "<IMG_CONTEXT>": INTERNVL_TEMPLATE,
}
"""Chat templates by the marker of an image."""
OWN_TEMPLATES = {"minicpmv4_6": MINICPM_TEMPLATE, "gemma4": GEMMA4_TEMPLATE, "mllama": MLLAMA_TEMPLATE}
"""Chat templates of architectures whose marker another architecture has, too."""
