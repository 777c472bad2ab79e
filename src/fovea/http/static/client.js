// The server's API: which requests there are, the key that they carry, and the errors that they end with.

import { EventParser } from "./sse.js";

// An error that the server or the network reported, in words for the user.
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", param = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

export class Client {
  // keys: the Keys of this tab. askKey(reason): asks the user for a key; resolves with whether one was given.
  constructor(keys, askKey) {
    this.keys = keys;
    this.askKey = askKey;
    this.asking = null;
  }

  // Ask the user for a key. Requests that fail meanwhile wait for the same answer.
  askOnce(reason) {
    this.asking ??= this.askKey(reason).finally(() => { this.asking = null; });
    return this.asking;
  }

  // Send a request. After a 401 the user is asked for a key, and the request is sent again.
  async request(path, options = {}) {
    for (;;) {
      const response = await this.send(path, options);
      if (response.ok) return response;
      const error = await errorOf(response);
      if (response.status !== 401 || !(await this.askOnce(error.message))) throw error;
    }
  }

  async send(path, options) {
    try {
      return await fetch(new URL(path, document.baseURI), {
        ...options, headers: { ...options.headers, ...this.keys.headers() }, redirect: "error",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached. Check that it runs, and try again.");
    }
  }

  async models() {
    return (await (await this.request("v1/models")).json()).data;
  }

  // Whether the server answers questions now, and why not.
  async ready() {
    const response = await this.send("ready", {});
    return response.ok ? { ready: true } : { ready: false, reason: (await errorOf(response)).message };
  }

  // Render pages of a PDF as images. Returns {pages, data}.
  async pdfPages(blob, first, last, maxSide) {
    const query = new URLSearchParams({ first, last, max_side: maxSide });
    try {
      const response = await this.request(`v1/images/pdf?${query}`, {
        method: "POST", headers: { "content-type": "application/pdf" }, body: blob,
      });
      return await response.json();
    } catch (error) {
      if (error.status === 404 || error.code === "pdf_unavailable") {
        throw new ApiError(`This server does not read PDF files: ${error.message}`, error);
      }
      throw error;
    }
  }

  // Ask for an answer, and yield the chunks of its stream. Raises ApiError if the stream ends with an error.
  async *chat(body, signal) {
    const response = await this.request("v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal,
    });
    const parser = new EventParser();
    const reader = response.body.getReader();
    let complete = false;
    try {
      for (;;) {
        const { done, value } = await readFrom(reader);
        for (const event of done ? parser.end() : parser.feed(value)) {
          if (event.data === "[DONE]") complete = true;
          else yield chunkOf(event);
        }
        if (done && complete) return;
        if (done) throw new ApiError("The stream ended before the answer was complete.");
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }
}

async function readFrom(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke off before the answer was complete.");
  }
}

function chunkOf(event) {
  let chunk;
  try {
    chunk = JSON.parse(event.data);
  } catch {
    throw new ApiError("The server sent an event that is not JSON.");
  }
  if (chunk.error || event.type === "error") {
    const { message = "The answer broke off.", code, param } = chunk.error || {};
    throw new ApiError(message, { code, param });
  }
  return chunk;
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { status: response.status, code: error.code, param: error.param });
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, { status: response.status });
  }
}
