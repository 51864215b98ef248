/** The settings dialog. All values live in its fields; they are kept in this browser, but for the API key, which
 * stays in this tab's session. */

const STORE = "s2moe.settings";
const KEY_STORE = "s2moe.api_key";
const KEY_FIELD = "api_key";

export class Settings {
  #dialog;
  #form;
  #problem;

  /** Called when the dialog has closed. */
  onClose = () => {};

  constructor(dialog) {
    this.#dialog = dialog;
    this.#form = dialog.querySelector("form");
    this.#problem = dialog.querySelector("#settings-problem");
    this.#load();
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.close();
    });
    this.#form.addEventListener("input", () => {
      this.#check();
      this.#save();
    });
    dialog.addEventListener("close", () => this.onClose());
    dialog.querySelector("#reset-settings").addEventListener("click", () => this.#reset());
  }

  get isOpen() {
    return this.#dialog.open;
  }

  /** Whether the server can be sent what the fields say. */
  get isValid() {
    return this.#form.checkValidity();
  }

  get apiKey() {
    return this.#value(KEY_FIELD);
  }

  get systemPrompt() {
    return this.#value("system");
  }

  /** The fields of a chat request; what is left to the server is undefined, and so not sent. */
  requestFields() {
    const thinking = this.#value("thinking");
    const s2moe = {
      speculation: this.#value("speculation") || undefined,
      preset: this.#value("preset") || undefined,
      max_nodes: this.#number("max_nodes"),
    };
    return {
      temperature: this.#number("temperature"),
      top_p: this.#number("top_p"),
      max_tokens: this.#number("max_tokens"),
      seed: this.#number("seed"),
      enable_thinking: thinking === "" ? undefined : thinking === "on",
      s2moe: Object.values(s2moe).some((value) => value !== undefined) ? s2moe : undefined,
    };
  }

  /** Shows in empty fields what the server takes for them. `params`: the sampling of /props. */
  showDefaults(params) {
    for (const name of ["temperature", "top_p", "seed"]) {
      const value = params[name];
      const text = typeof value === "number" ? String(Number(value.toFixed(4))) : "";
      this.#form.elements[name].placeholder = text;
    }
  }

  open() {
    this.#dialog.showModal();
    this.#check();
  }

  /** Opens the dialog at the first field that is wrong. */
  openAtProblem() {
    this.open();
    this.#form.querySelector(":invalid:not(fieldset)")?.focus();
  }

  close() {
    this.#check();
    if (this.isValid) this.#dialog.close();
    else this.#form.querySelector(":invalid:not(fieldset)").focus();
  }

  #check() {
    const field = this.#form.querySelector(":invalid:not(fieldset)");
    const label = field === null ? "" : this.#form.querySelector(`label[for="${field.id}"]`).textContent;
    this.#problem.textContent = field === null ? "" : `${label}: ${field.validationMessage}`;
  }

  #reset() {
    const key = this.apiKey;
    this.#form.reset();
    this.#form.elements[KEY_FIELD].value = key;
    this.#check();
    this.#save();
  }

  #value(name) {
    return this.#form.elements[name].value;
  }

  #number(name) {
    const field = this.#form.elements[name];
    return field.value === "" ? undefined : field.valueAsNumber;
  }

  #save() {
    const { [KEY_FIELD]: key, ...rest } = Object.fromEntries(new FormData(this.#form));
    const given = Object.entries(rest).filter(([, value]) => value !== "");
    write(localStorage, STORE, JSON.stringify(Object.fromEntries(given)));
    write(sessionStorage, KEY_STORE, key);
  }

  #load() {
    for (const [name, value] of Object.entries(storedSettings())) {
      const field = this.#form.elements.namedItem(name);
      if (field !== null && name !== KEY_FIELD) field.value = String(value);
    }
    this.#form.elements[KEY_FIELD].value = sessionStorage.getItem(KEY_STORE) ?? "";
  }
}

function storedSettings() {
  try {
    return JSON.parse(localStorage.getItem(STORE) ?? "{}") ?? {};
  } catch {
    return {}; // written by something else
  }
}

function write(store, name, value) {
  try {
    store.setItem(name, value);
  } catch {
    // A full or forbidden store: the values then last as long as the page.
  }
}
