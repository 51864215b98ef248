/** Prometheus text → the figures of the page. */

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** The samples of one scrape. */
export class Samples {
  #byName = new Map();

  /** `secondsNow`: when the text was made, on any clock that runs evenly. */
  constructor(text, secondsNow) {
    this.seconds = secondsNow;
    for (const line of text.split("\n")) {
      const match = line.startsWith("#") ? null : SAMPLE.exec(line);
      if (match === null) continue;
      const samples = this.#byName.get(match[1]) ?? [];
      samples.push({ labels: labelsOf(match[2] ?? ""), value: Number(match[3]) });
      this.#byName.set(match[1], samples);
    }
  }

  /** All samples of a series: `{labels, value}`. */
  of(name) {
    return this.#byName.get(`s2moe_${name}`) ?? [];
  }

  /** Sum over the samples whose labels `accept` lets pass; 0 where there is none. */
  sum(name, accept = () => true) {
    return this.of(name).reduce((sum, { labels, value }) => (accept(labels) ? sum + value : sum), 0);
  }
}

function labelsOf(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(LABEL)) {
    labels[name] = value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));
  }
  return labels;
}

export function engineState(samples) {
  return samples.of("engine_state").find(({ value }) => value === 1)?.labels.state ?? "unknown";
}

export function queueOf(samples) {
  return {
    running: samples.sum("requests_running"),
    waiting: samples.sum("requests_waiting"),
    capacity: samples.sum("queue_capacity"),
  };
}

export function kvOf(samples) {
  return { tokens: samples.sum("kv_cache_tokens"), capacity: samples.sum("kv_cache_capacity_tokens") };
}

/** Tokens per second between two scrapes; null where none were generated. */
export function tokensPerSecond(samples, before) {
  const tokens = samples.sum("generated_tokens_total") - before.sum("generated_tokens_total");
  const seconds = samples.seconds - before.seconds;
  return tokens > 0 && seconds > 0 ? tokens / seconds : null;
}

/** {rate, tokensPerStep} of all drafts since the server started; null where there is nothing to divide by. */
export function acceptanceOf(samples) {
  const verified = samples.sum("spec_decode_draft_tokens_total");
  const accepted = samples.sum("spec_decode_accepted_tokens_total");
  const iterations = samples.sum("spec_decode_drafts_total");
  return { rate: ratio(accepted, verified), tokensPerStep: iterations > 0 ? 1 + accepted / iterations : null };
}

/** How well the latest evaluations of `target` ("verify" or "draft") were predicted: {error, r2, count}, the error as a
 * share of the measured seconds; null = no fit yet. */
export function costFitOf(samples, target) {
  const of = (name) => samples.sum(`cost_model_${name}`, (labels) => labels.target === target);
  const count = of("samples");
  return count > 0 ? { error: of("mape_ratio"), r2: of("r2"), count } : null;
}

/** Share of the experts that decoding needed and found in memory or on their way: since `before`, or since the
 * server started. null where none were needed. */
export function hitRate(samples, before = null) {
  const count = (accept) => {
    const name = "expert_cache_lookups_total";
    return samples.sum(name, accept) - (before?.sum(name, accept) ?? 0);
  };
  const all = count(({ phase }) => phase === "decode");
  const misses = count(({ phase, result }) => phase === "decode" && result === "miss");
  return ratio(all - misses, all);
}

/** Slots for experts: {resident, capacity}; capacity 0 = the model has no expert cache. */
export function slotsOf(samples) {
  return {
    resident: samples.sum("expert_cache_resident_experts"),
    capacity: samples.sum("expert_cache_capacity_experts"),
  };
}

/** Memory by pool, `{pool, used, budget}` in bytes; without pools that have neither. */
export function poolsOf(samples) {
  const used = (pool) => samples.sum("memory_used_bytes", (labels) => labels.pool === pool);
  return samples
    .of("memory_budget_bytes")
    .map(({ labels, value }) => ({ pool: labels.pool, used: used(labels.pool), budget: value }))
    .filter((each) => each.used > 0 || each.budget > 0);
}

/** {available, total} bytes of the machine or container; 0 = not known. */
export function hostMemoryOf(samples) {
  return { available: samples.sum("memory_available_bytes"), total: samples.sum("memory_total_bytes") };
}

function ratio(part, whole) {
  return whole > 0 ? part / whole : null;
}
