/** The conversation: asks, stops, asks again, begins anew. One answer runs at a time. */

import { ServerError } from "./api.js";
import { Turn, messagesOf } from "./turn.js";
import { TurnView } from "./turn_view.js";

const AT_BOTTOM_PIXELS = 48;

export class Chat {
  #api;
  #settings;
  #announcer;
  #list;
  #scroller;
  #turns = [];
  #views = [];
  #abort = null;

  /** Called when an answer begins or ends, and when the conversation becomes empty. */
  onChange = () => {};
  /** Called with a question that brought nothing, for another try. */
  onReturned = () => {};
  /** Called with each turn that has ended. */
  onAnswered = () => {};

  /** `list`: the element for the turns; `scroller`: what scrolls them. */
  constructor({ api, settings, announcer, list, scroller }) {
    this.#api = api;
    this.#settings = settings;
    this.#announcer = announcer;
    this.#list = list;
    this.#scroller = scroller;
  }

  get isRunning() {
    return this.#abort !== null;
  }

  get isEmpty() {
    return this.#turns.length === 0;
  }

  async ask(question) {
    if (this.isRunning) return;
    if (this.#turns.at(-1)?.isEmpty) this.#dropLast();
    this.#views.at(-1)?.forbidRetry();
    const turn = new Turn(question);
    const view = new TurnView(turn, {
      onRetry: () => this.#retry(),
      onChange: (change) => this.#keepingBottom(change),
    });
    this.#turns.push(turn);
    this.#views.push(view);
    this.#list.append(view.node);
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    await this.#run(turn, view);
  }

  /** Aborts the request, upon which the server stops the engine. */
  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.#abort = null;
    this.#turns = [];
    this.#views = [];
    this.#list.replaceChildren();
    this.#announcer.begin();
    this.onChange();
  }

  #retry() {
    if (this.isRunning) return;
    const { question } = this.#turns.at(-1);
    this.#dropLast();
    this.ask(question);
  }

  #dropLast() {
    this.#turns.pop();
    this.#views.pop().node.remove();
  }

  async #run(turn, view) {
    const abort = new AbortController();
    this.#abort = abort;
    this.#announcer.begin();
    this.onChange();
    try {
      const fields = this.#settings.requestFields();
      const messages = messagesOf(this.#turns, this.#settings.systemPrompt);
      for await (const chunk of this.#api.chat({ messages, return_progress: true, ...fields }, abort.signal)) {
        turn.take(chunk);
        view.update();
        this.#announcer.follow(turn.content);
      }
      turn.end("done");
    } catch (error) {
      if (abort.signal.aborted) turn.end("stopped");
      else turn.end("failed", error);
      if (turn.state === "failed" && !(error instanceof ServerError)) console.error(error);
    }
    view.finish();
    if (this.#abort !== abort) return; // the conversation was cleared meanwhile
    this.#abort = null;
    this.#announcer.finish(turn.content, noteOf(turn));
    if (turn.isEmpty && turn.state !== "done") this.onReturned(turn.question);
    this.onChange();
    this.onAnswered(turn);
  }

  /** Makes a change and stays at the end of the conversation, unless the reader has scrolled away. */
  #keepingBottom(change) {
    const box = this.#scroller;
    const wasAtBottom = box.scrollHeight - box.scrollTop - box.clientHeight < AT_BOTTOM_PIXELS;
    change();
    if (wasAtBottom) box.scrollTop = box.scrollHeight;
  }
}

/** What a screen reader is told at the end of a turn. */
function noteOf(turn) {
  if (turn.state === "failed") return `Error: ${turn.error.message}`;
  return turn.state === "stopped" ? "Stopped." : "End of the answer.";
}
