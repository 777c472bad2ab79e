"""The page of a Hugging Face Space: a picture, a question, the answer, and what in the picture mattered.

It asks the Fovea server of the same container. The Space shows one port, so its metrics are at /metrics of
this page.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import gradio as gr  # type: ignore[import-not-found]
import httpx
import numpy as np
import uvicorn  # Gradio brings it, and FastAPI
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from PIL import Image

SERVER = f"http://127.0.0.1:{os.environ.get('FOVEA_PORT', '8000')}"
PORT = int(os.environ.get("PORT", "7860"))
TIMEOUT_S = float(os.environ.get("FOVEA_TIMEOUT_S", "600"))
HOT = np.array([255, 60, 0], np.float32)
client = httpx.Client(base_url=SERVER, timeout=TIMEOUT_S)


def predict(image: str | None, question: str, keep: float) -> tuple[str, Image.Image | None, dict[str, Any]]:
    """Return the answer, the picture with its relevance as heat, and the figures of the answer.

    image: path of the uploaded file. keep: share of the visual tokens that is kept.
    """
    if not image:
        raise gr.Error("Choose a picture first.")
    data = base64.b64encode(Path(image).read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/any;base64,{data}"}},
        {"type": "text", "text": question or "What is in the picture?"},
    ]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    if keep < 1:
        body["visual_tokens"] = {"method": "relevance", "keep": keep, "explain": True}
    answer = ask(body)
    used = answer.get("fovea", {})
    record: dict[str, Any] = [*used.get("images", []), {}][0]
    relevance = record.pop("relevance", None)
    figures = {"usage": answer["usage"], "image": record, "timings_ms": used.get("timings_ms", {})}
    heat = None if relevance is None else heat_map(Image.open(image).convert("RGB"), relevance)
    return answer["choices"][0]["message"]["content"], heat, figures


def ask(body: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the server. Its errors are shown on the page."""
    try:
        reply = client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        raise gr.Error(f"The server does not answer: {error}") from error
    answer: dict[str, Any] = reply.json()
    if reply.status_code != 200:
        raise gr.Error(answer["error"]["message"])
    return answer


def heat_map(picture: Image.Image, relevance: dict[str, Any]) -> Image.Image:
    """Return the picture, redder where it is more relevant to the question."""
    rows, columns = relevance["grid"]
    cells = np.asarray(relevance["map"], np.float32).reshape(rows, columns)
    spread = float(cells.max() - cells.min())
    cells = (cells - cells.min()) / spread if spread else np.zeros_like(cells)
    scaled = Image.fromarray((cells * 255).astype(np.uint8)).resize(picture.size, Image.Resampling.BILINEAR)
    weight = np.asarray(scaled, np.float32)[..., None] / 255 * 0.6
    return Image.fromarray((np.asarray(picture) * (1 - weight) + HOT * weight).astype(np.uint8))


def page() -> Any:
    """Return the page. Its function is also the API endpoint /predict."""
    return gr.Interface(
        fn=predict,
        inputs=[
            gr.Image(type="filepath", label="Picture"),
            gr.Textbox(label="Question", placeholder="What is in the picture?"),
            gr.Slider(0.1, 1.0, 0.5, step=0.05, label="Share of visual tokens that is kept"),
        ],
        outputs=[
            gr.Textbox(label="Answer"),
            gr.Image(label="Relevance to the question"),
            gr.JSON(label="Figures"),
        ],
        title=os.environ.get("SPACE_TITLE_TEXT", "Fovea"),
        description="A vision-language model that spends its tokens where the question needs them.",
        flagging_mode="never",
        api_name="predict",
    )


app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@app.get("/metrics")  # type: ignore[untyped-decorator]
def metrics() -> PlainTextResponse:
    """Pass the metrics of the server on."""
    reply = client.get("/metrics")
    return PlainTextResponse(reply.text, reply.status_code, media_type="text/plain; version=0.0.4")


app = gr.mount_gradio_app(app, page(), path="/")

if __name__ == "__main__":
    uvicorn.run(app, host="0.0.0.0", port=PORT)
