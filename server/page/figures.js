/** The panel of live figures. */

import { make, setText } from "./dom.js";
import * as format from "./format.js";
import * as metrics from "./metrics.js";

const POOL_NAMES = {
  weights: "Weights",
  kv: "KV cache",
  compute: "Compute buffers",
  expert_cache: "Expert cache",
  prompt_cache: "Prompt cache",
  processes: "Processes",
  reserve: "Reserve",
};

export class Figures {
  #root;
  #rows = new Map();
  #lastTurn = null;
  #samples = null;
  #recentHitRate = null;

  constructor(root) {
    this.#root = root;
  }

  /** `before`: the samples of the look before, null = there are none. */
  show(samples, before) {
    this.#samples = samples;
    this.#showSpeed(before === null ? null : metrics.tokensPerSecond(samples, before));
    this.#showAcceptance();
    this.#showHits(samples, before);
    this.#showCosts(samples);
    const queue = metrics.queueOf(samples);
    this.#set("queue", `${queue.waiting} of ${queue.capacity} waiting`);
    this.#set("queue-more", queue.running > 0 ? "an answer is being made" : "no answer is being made");
    const kv = metrics.kvOf(samples);
    this.#set("kv", kv.capacity > 0 ? format.count(kv.tokens) : "–");
    this.#set("kv-more", kv.capacity > 0 ? `of ${format.count(kv.capacity)}` : "");
    this.#showMemory(samples);
  }

  /** The turn that ended last in this page. */
  showTurn(turn) {
    if (turn.timings === null) return;
    this.#lastTurn = turn;
    this.#showSpeed(null);
    this.#showAcceptance();
  }

  /** `card`: of /v1/models; `props`: of /props, or null. */
  showModel(card, props) {
    const meta = card.meta;
    const facts = [["Name", card.id]];
    if (meta !== null) {
      const drafts = [meta.speculation_method, meta.speculation_preset].filter(Boolean).join(", ");
      facts.push(["Architecture", `${meta.architecture}, ${meta.quantization}`]);
      facts.push(["Size", format.bytes(meta.size)]);
      facts.push(["Context", `${format.count(meta.n_ctx)} tokens`]);
      if (meta.n_expert > 0) facts.push(["Experts", `${meta.n_expert_used} of ${meta.n_expert} per token`]);
      facts.push(["Speculation", meta.speculation_limit ? `${drafts}; ${meta.speculation_limit}` : drafts]);
    }
    const rows = facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    this.#node("model").replaceChildren(...rows);
    const lines = [...(props?.plan?.lines ?? []), ...(props?.plan?.warnings ?? [])];
    this.#node("plan").hidden = lines.length === 0;
    this.#set("plan-text", lines.join("\n"));
  }

  showNote(text) {
    this.#node("figures-note").hidden = text === "";
    this.#set("figures-note", text);
  }

  /** `now`: tokens per second at this moment, null = none are made. */
  #showSpeed(now) {
    const last = this.#lastTurn?.timings ?? null;
    const prompt = last?.prompt_per_second > 0 ? `, prompt ${format.speed(last.prompt_per_second)}` : "";
    if (now !== null) {
      this.#set("speed", format.speed(now));
      const before = last === null ? "" : `; last answer ${format.speed(last.predicted_per_second)}`;
      this.#set("speed-more", `now${before}`);
    } else if (last !== null) {
      this.#set("speed", format.speed(last.predicted_per_second));
      this.#set("speed-more", `last answer${prompt}`);
    } else {
      this.#set("speed", "–");
      this.#set("speed-more", "no answer yet");
    }
  }

  /** Of the last answer if it had drafts, else of all answers. */
  #showAcceptance() {
    const all = this.#samples === null ? null : metrics.acceptanceOf(this.#samples);
    const last = this.#lastTurn?.speculation ?? null;
    const steps = (tokens) => `${tokens.toFixed(2)} tokens per drafting step`;
    if (last !== null && last.acceptance_rate !== null) {
      this.#set("acceptance", format.percent(last.acceptance_rate));
      const since = all === null || all.rate === null ? "" : `; ${format.percent(all.rate)} since the start`;
      this.#set("acceptance-more", `last answer, ${steps(last.acceptance_length)}${since}`);
    } else if (all !== null && all.rate !== null) {
      this.#set("acceptance", format.percent(all.rate));
      this.#set("acceptance-more", `since the start, ${steps(all.tokensPerStep)}`);
    }
  }

  #showHits(samples, before) {
    const slots = metrics.slotsOf(samples);
    const always = metrics.hitRate(samples);
    if (before !== null) this.#recentHitRate = metrics.hitRate(samples, before) ?? this.#recentHitRate;
    const recent = this.#recentHitRate ?? always;
    this.#set("hits", format.percent(recent, 1));
    if (slots.capacity === 0) {
      this.#set("hits-more", "no expert cache");
      return;
    }
    const since = always === null ? "no lookups yet" : `${format.percent(always, 1)} since the start`;
    const full = `${format.count(slots.resident)} of ${format.count(slots.capacity)} slots filled`;
    this.#set("hits-more", `${since}, ${full}`);
  }

  #showCosts(samples) {
    const verify = metrics.costFitOf(samples, "verify");
    if (verify === null) return;
    const draft = metrics.costFitOf(samples, "draft");
    const r2 = (fit) => `R² ${fit.r2.toFixed(2)}`;
    const drafts = draft === null ? "" : `; drafts ${format.percent(draft.error, 1)}, ${r2(draft)}`;
    this.#set("costs", format.percent(verify.error, 1));
    this.#set("costs-more", `verification, ${r2(verify)}${drafts}`);
  }

  #showMemory(samples) {
    const pools = metrics.poolsOf(samples);
    if (pools.length > 0) pools.push(totalOf(pools));
    for (const [pool, row] of this.#rows) {
      if (!pools.some((each) => each.pool === pool)) {
        row.node.remove();
        this.#rows.delete(pool);
      }
    }
    for (const each of pools) this.#rowOf(each.pool).show(each);
    const { available, total } = metrics.hostMemoryOf(samples);
    const free = `${format.bytes(available)} of ${format.bytes(total)} free on this machine`;
    this.#set("host-memory", total > 0 ? free : "");
  }

  #rowOf(pool) {
    let row = this.#rows.get(pool);
    if (row === undefined) {
      row = new PoolRow(pool);
      this.#rows.set(pool, row);
      this.#node("pools").append(row.node);
    }
    return row;
  }

  #node(id) {
    return this.#root.querySelector(`#${id}`);
  }

  #set(id, text) {
    setText(this.#node(id), text);
  }
}

const TOTAL = "all";

function totalOf(pools) {
  const sum = (key) => pools.reduce((total, pool) => total + pool[key], 0);
  return { pool: TOTAL, used: sum("used"), budget: sum("budget") };
}

class PoolRow {
  #meter;
  #numbers = make("td", { class: "numbers" });

  constructor(pool) {
    const name = pool === TOTAL ? "Together" : (POOL_NAMES[pool] ?? pool.replaceAll("_", " "));
    this.#meter = make("meter", { min: "0", "aria-label": `${name}, used of its budget` });
    this.node = make(
      "tr",
      { class: pool === TOTAL ? "total" : false },
      make("th", { scope: "row" }, name),
      make("td", {}, this.#meter),
      this.#numbers,
    );
  }

  show({ used, budget }) {
    this.#meter.max = Math.max(used, budget, 1);
    this.#meter.value = used;
    this.#meter.classList.toggle("over", used > budget);
    setText(this.#numbers, `${format.bytes(used)} / ${format.bytes(budget)}`);
  }
}
