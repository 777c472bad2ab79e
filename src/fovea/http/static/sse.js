// A parser of server-sent events. Bytes may be cut anywhere: within a character, a line end or an event.

export class EventParser {
  constructor() {
    this.decoder = new TextDecoder();
    this.rest = "";
    this.afterCr = false;
    this.data = [];
    this.type = "";
  }

  // Add bytes. Returns the events that are complete now: {type, data}.
  feed(bytes) {
    return this.read(this.decoder.decode(bytes, { stream: true }));
  }

  // Read what is left at the end of the stream. An event without its blank line is dropped.
  end() {
    return this.read(this.decoder.decode());
  }

  read(text) {
    const events = [];
    if (this.afterCr && text) {
      if (text[0] === "\n") text = text.slice(1);
      this.afterCr = false;
    }
    let buffer = this.rest + text;
    if (buffer.endsWith("\r")) this.afterCr = true;
    const lines = buffer.split(/\r\n|\r|\n/);
    this.rest = lines.pop();
    for (const line of lines) {
      const event = this.readLine(line);
      if (event) events.push(event);
    }
    return events;
  }

  readLine(line) {
    if (line === "") {
      const event = this.data.length ? { type: this.type || "message", data: this.data.join("\n") } : null;
      this.data = [];
      this.type = "";
      return event;
    }
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (name === "data") this.data.push(value);
    else if (name === "event") this.type = value;
    return null;
  }
}
