/** The server's own endpoints. Paths are relative, so that the page also works behind a path of a proxy. */

import { eventData } from "./sse.js";

/** What the server, or the way to it, says against a request; `message` is for people. */
export class ServerError extends Error {
  /** status: of HTTP, 0 = there was no answer; code: the server's own word for the case, or "". */
  constructor(message, { status = 0, code = "", retryAfterSeconds = null } = {}) {
    super(message);
    this.name = "ServerError";
    this.status = status;
    this.code = code;
    this.retryAfterSeconds = retryAfterSeconds;
  }
}

const UNREACHABLE = "The server does not answer. Is it still running?";
const CUT_OFF = "The answer was cut off: the connection to the server ended.";

export class Api {
  #readKey;

  /** `readKey`: returns the API key, or "". Asked for each request. */
  constructor(readKey) {
    this.#readKey = readKey;
  }

  /** `{status, reason}` of /health, whatever its HTTP status. Throws ServerError. */
  async health(signal) {
    const response = await this.#send("health", { signal });
    return await response.json();
  }

  async json(path, signal) {
    return await (await this.#ask(path, { signal })).json();
  }

  async text(path, signal) {
    return await (await this.#ask(path, { signal })).text();
  }

  /** Yields the chunks of a streamed answer. Throws ServerError, also for an error within the stream, and
   * an AbortError after `signal`. */
  async *chat(fields, signal) {
    const body = JSON.stringify({ ...fields, stream: true, stream_options: { include_usage: true } });
    const headers = { "Content-Type": "application/json" };
    const response = await this.#ask("v1/chat/completions", { method: "POST", headers, body, signal });
    try {
      for await (const data of eventData(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(chunk.error.message, { code: chunk.error.code ?? "" });
        yield chunk;
      }
    } catch (error) {
      if (error instanceof ServerError || signal.aborted) throw error;
      throw new ServerError(CUT_OFF);
    }
    throw new ServerError(CUT_OFF);
  }

  /** As #send, but an HTTP status of failure throws ServerError with the server's message. */
  async #ask(path, options) {
    const response = await this.#send(path, options);
    if (!response.ok) throw await errorOf(response);
    return response;
  }

  async #send(path, { headers = {}, ...options }) {
    const key = this.#readKey();
    if (key) headers = { ...headers, Authorization: `Bearer ${key}` };
    try {
      return await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ServerError(UNREACHABLE);
    }
  }
}

async function errorOf(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // Not from this server: a proxy answers with pages.
  }
  const seconds = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  return new ServerError(error?.message ?? `The server answered ${response.status} ${response.statusText}.`, {
    status: response.status,
    code: error?.code ?? "",
    retryAfterSeconds: Number.isNaN(seconds) ? null : seconds,
  });
}
