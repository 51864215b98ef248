/** How a turn looks. */

import { copyButton, make, setText } from "./dom.js";
import * as format from "./format.js";
import { StreamingMarkdown } from "./markdown.js";

export class TurnView {
  #turn;
  #answer = make("div", { class: "text" });
  #markdown = new StreamingMarkdown(this.#answer);
  #reasoningText = document.createTextNode("");
  #summary = make("summary", {}, "Thinking…");
  #reasoning = make("details", { class: "reasoning", hidden: true }, this.#summary);
  #waiting = make("p", { class: "waiting" }, "Waiting for the engine…");
  #article = make("article", { class: "answer", "aria-busy": "true" });
  #frame = 0;

  /** `onRetry`: called when the answer is to be made anew. `onChange`: called around each change of the view
   * with a function that makes it. */
  constructor(turn, { onRetry, onChange }) {
    this.#turn = turn;
    this.onRetry = onRetry;
    this.onChange = onChange;
    const question = make("p", { class: "text" }, turn.question);
    this.#reasoning.append(make("div", { class: "reasoning-text" }, this.#reasoningText));
    this.#article.append(make("h2", { class: "unseen" }, "Model"), this.#reasoning, this.#answer, this.#waiting);
    this.node = make(
      "li",
      { class: "turn" },
      make("article", { class: "question" }, make("h2", { class: "unseen" }, "You"), question),
      this.#article,
    );
  }

  /** Shows what the turn has, with the next frame: tokens may come faster than the screen. */
  update() {
    if (this.#frame !== 0) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      this.onChange(() => this.#show());
    });
  }

  /** The turn has ended. */
  finish() {
    cancelAnimationFrame(this.#frame);
    this.onChange(() => {
      this.#show();
      this.#waiting.hidden = true;
      this.#article.removeAttribute("aria-busy");
      if (this.#turn.error !== null) this.#article.append(errorNode(this.#turn.error));
      this.#article.append(this.#footer());
    });
  }

  /** Only the last answer can be made anew. */
  forbidRetry() {
    this.#article.querySelector(".retry")?.remove();
  }

  #show() {
    const turn = this.#turn;
    this.#markdown.update(turn.content, turn.state !== "running");
    if (turn.reasoning.length > this.#reasoningText.length) {
      this.#reasoningText.appendData(turn.reasoning.slice(this.#reasoningText.length));
    }
    this.#reasoning.hidden = turn.reasoning === "";
    if (turn.reasoningSeconds !== null) {
      setText(this.#summary, `Thought for ${format.seconds(turn.reasoningSeconds)}`);
    }
    this.#waiting.hidden = !turn.isEmpty;
    const progress = turn.progress;
    if (progress !== null) {
      const counts = `${format.count(progress.processed)} of ${format.count(progress.total)} tokens`;
      setText(this.#waiting, `Reading the prompt, ${counts}…`);
    }
  }

  #footer() {
    const turn = this.#turn;
    const footer = make("footer", { class: "turn-foot" });
    if (turn.content !== "") footer.append(copyButton("Copy this answer", () => turn.content));
    if (!turn.isEmpty) {
      const retry = make("button", { type: "button", class: "quiet retry" }, "Try again");
      retry.addEventListener("click", () => this.onRetry());
      footer.append(retry);
    }
    const facts = factsOf(turn);
    if (facts.length > 0) footer.append(make("p", { class: "turn-facts" }, facts.join(" · ")));
    return footer;
  }
}

function errorNode(error) {
  const node = make("p", { class: "error" }, error.message);
  const notes = [error.status, error.code].filter(Boolean);
  if (error.retryAfterSeconds > 0) notes.push(`try again in ${error.retryAfterSeconds} s`);
  if (notes.length > 0) node.append(" ", make("span", { class: "error-code" }, `(${notes.join(", ")})`));
  return node;
}

function factsOf(turn) {
  const facts = [];
  if (turn.state === "stopped") facts.push("stopped");
  if (turn.state === "done" && turn.isEmpty) facts.push("an empty answer");
  if (turn.finishReason === "length") facts.push("cut at the token limit");
  if (turn.usage !== null) {
    const details = turn.usage.prompt_tokens_details?.cached_tokens ?? 0;
    const cached = details > 0 ? ` (${format.count(details)} cached)` : "";
    facts.push(`${format.count(turn.usage.completion_tokens)} tokens`);
    facts.push(`prompt ${format.count(turn.usage.prompt_tokens)}${cached}`);
  }
  if (turn.timings?.predicted_per_second > 0) facts.push(format.speed(turn.timings.predicted_per_second));
  if (turn.firstTextSeconds !== null) facts.push(`first text after ${format.seconds(turn.firstTextSeconds)}`);
  const rate = turn.speculation?.acceptance_rate ?? null;
  if (rate !== null) facts.push(`${format.percent(rate)} of drafts accepted`);
  return facts;
}
