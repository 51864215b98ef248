/** One question and what has come of its answer; a value without a view. */

export class Turn {
  content = "";
  reasoning = "";
  /** running, done, stopped or failed */
  state = "running";
  finishReason = null;
  /** ServerError of a failed turn. */
  error = null;
  usage = null;
  timings = null;
  speculation = null;
  /** {total, cache, processed} in tokens, while the prompt is evaluated. */
  progress = null;
  /** Seconds from the question to the first text, and how long the model reasoned; null = not yet. */
  firstTextSeconds = null;
  reasoningSeconds = null;
  #asked = performance.now();

  constructor(question) {
    this.question = question;
  }

  /** Whether there is anything to read in it. */
  get isEmpty() {
    return this.content === "" && this.reasoning === "";
  }

  /** Adds a chunk of the stream. */
  take(chunk) {
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const content = delta.content ?? "";
    if (this.firstTextSeconds === null && (reasoning || content)) this.firstTextSeconds = this.#age();
    if (this.reasoning && content && this.reasoningSeconds === null) this.reasoningSeconds = this.#age();
    this.reasoning += reasoning;
    this.content += content;
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    this.progress = chunk.prompt_progress ?? this.progress;
    this.usage = chunk.usage ?? this.usage;
    this.timings = chunk.timings ?? this.timings;
    this.speculation = chunk.speculation ?? this.speculation;
  }

  /** state: done, stopped or failed. */
  end(state, error = null) {
    this.state = state;
    this.error = error;
    if (this.reasoning && this.reasoningSeconds === null) this.reasoningSeconds = this.#age();
  }

  #age() {
    return (performance.now() - this.#asked) / 1000;
  }
}

/** The `messages` of a request: the system prompt and all turns. What brought no answer is left out, but for
 * the last question. Reasoning is not sent back: templates drop it. */
export function messagesOf(turns, systemPrompt) {
  const messages = systemPrompt.trim() === "" ? [] : [{ role: "system", content: systemPrompt }];
  for (const turn of turns) {
    const isLast = turn === turns.at(-1);
    if (turn.content === "" && !isLast) continue;
    messages.push({ role: "user", content: turn.question });
    if (!isLast) messages.push({ role: "assistant", content: turn.content });
  }
  return messages;
}
