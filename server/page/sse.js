/** Server-sent events: text in pieces of any size → the data of each event. Comments and other fields are
 * dropped, since the API uses none. */
export class EventParser {
  #rest = "";
  #data = [];

  /** Returns the data of the events that `text` completes; an event ends with an empty line. */
  feed(text) {
    // A carriage return at the very end may be half of a line end.
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length > 0) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}

/** The data of each event of a response's body. Ends with the body; leaving early cancels it. */
export async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {}); // already closed or aborted
  }
}
