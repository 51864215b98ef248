/** Tells a screen reader what happens: whole sentences of an answer, never half a word. */

import { make } from "./dom.js";

const SENTENCE_END = /[.!?…](?=\s)|[。！？\n]/g;
const KEPT = 3;

export class Announcer {
  #region;
  #said = 0;

  /** `region`: an element with aria-live. */
  constructor(region) {
    this.#region = region;
  }

  /** A new answer begins. */
  begin() {
    this.#region.replaceChildren();
    this.#said = 0;
  }

  /** Says the sentences that `text`, the answer so far, has beyond what was said. */
  follow(text) {
    let end = this.#said;
    SENTENCE_END.lastIndex = this.#said;
    while (SENTENCE_END.exec(text) !== null) end = SENTENCE_END.lastIndex;
    this.#sayUntil(text, end);
  }

  /** Says the rest of the answer, and then `note`. */
  finish(text, note) {
    this.#sayUntil(text, text.length);
    this.say(note);
  }

  say(text) {
    const plain = text.replace(/[`*#>|]+/g, " ").trim();
    if (plain === "") return;
    this.#region.append(make("p", {}, plain));
    while (this.#region.childElementCount > KEPT) this.#region.firstElementChild.remove();
  }

  #sayUntil(text, end) {
    if (end <= this.#said) return;
    const from = this.#said;
    this.#said = end;
    this.say(text.slice(from, end));
  }
}
