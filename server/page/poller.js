/** Reads the server's state again and again, but only while the page can be seen. */

import { ServerError } from "./api.js";
import { Samples, engineState } from "./metrics.js";

const INTERVAL_MS = 2000;
const PATIENCE_MS = 10000;

export class Poller {
  #api;
  #timer = 0;
  #abort = null;
  #before = null;
  #needsKey = false;
  #described = false;

  /** Called after each look: `{status, reason}`, as /health says it or "unreachable", and the engine's state. */
  onState = () => {};
  /** Called with the samples of /metrics and those before them (null = the first ones). */
  onSamples = () => {};
  /** Called with the model's card of /v1/models and the answer of /props, null where there is none. */
  onModel = () => {};
  /** Called with why there are no figures, or "". */
  onNote = () => {};

  constructor(api) {
    this.#api = api;
  }

  start() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#pause() : this.refresh()));
    if (!document.hidden) this.refresh();
  }

  /** Looks at once, as if for the first time: the page was shown, or the key has changed. */
  refresh() {
    this.#pause();
    this.#needsKey = false;
    this.#described = false;
    this.#poll();
  }

  #pause() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#before = null;
  }

  async #poll() {
    const abort = new AbortController();
    this.#abort = abort;
    const signal = AbortSignal.any([abort.signal, AbortSignal.timeout(PATIENCE_MS)]);
    try {
      await this.#look(signal);
    } catch (error) {
      if (abort.signal.aborted) return;
      this.#before = null;
      this.#described = false;
      this.onState({ status: "unreachable", reason: error instanceof ServerError ? error.message : "" });
    }
    if (!abort.signal.aborted) this.#timer = setTimeout(() => this.#poll(), INTERVAL_MS);
  }

  async #look(signal) {
    const [health, samples] = await Promise.all([this.#api.health(signal), this.#readMetrics(signal)]);
    this.onState(health, samples === null ? "" : engineState(samples));
    this.onNote(this.#needsKey ? "The figures need the API key; give it in the settings." : "");
    if (samples !== null) this.onSamples(samples, this.#before);
    this.#before = samples;
    if (health.status !== "ok") this.#described = false;
    else if (!this.#described && !this.#needsKey) await this.#describe(signal);
  }

  /** null where the key is missing or wrong, which is then not asked again until it changes. */
  async #readMetrics(signal) {
    if (this.#needsKey) return null;
    try {
      const text = await this.#api.text("metrics", signal);
      return new Samples(text, performance.now() / 1000);
    } catch (error) {
      if (error.status !== 401) throw error;
      this.#needsKey = true;
      return null;
    }
  }

  async #describe(signal) {
    const [models, props] = await Promise.all([
      this.#api.json("v1/models", signal),
      this.#api.json("props", signal).catch(ignoreAnswer),
    ]);
    this.#described = true;
    this.onModel(models.data[0], props);
  }
}

/** The page does without what an endpoint refuses to tell; that there is no answer at all is another matter. */
function ignoreAnswer(error) {
  if (!(error.status > 0)) throw error;
  return null;
}
