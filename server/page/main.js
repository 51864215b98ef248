/** Puts the page together: who tells whom, and what keys do. */

import { Announcer } from "./announcer.js";
import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { setText } from "./dom.js";
import { Figures } from "./figures.js";
import { Poller } from "./poller.js";
import { Settings } from "./settings.js";

const WIDE = "(min-width: 60rem)";
const node = (id) => document.getElementById(id);

const input = node("input");
const settings = new Settings(node("settings"));
const api = new Api(() => settings.apiKey);
const announcer = new Announcer(node("announcements"));
const figures = new Figures(node("figures"));
const poller = new Poller(api);
const chat = new Chat({ api, settings, announcer, list: node("turns"), scroller: node("scroller") });

function send() {
  const question = input.value;
  if (chat.isRunning || question.trim() === "") return;
  if (!settings.isValid) {
    settings.openAtProblem();
    return;
  }
  input.value = "";
  chat.ask(question);
}

function showFigures(shown) {
  node("figures").hidden = !shown;
  node("show-figures").setAttribute("aria-expanded", String(shown));
}

chat.onChange = () => {
  const stop = node("stop");
  node("send").hidden = chat.isRunning;
  stop.hidden = !chat.isRunning;
  // a button that had the focus is gone
  if (document.activeElement === document.body || document.activeElement.hidden) input.focus();
  node("welcome").hidden = !chat.isEmpty;
};
chat.onReturned = (question) => {
  if (input.value === "") input.value = question;
};
chat.onAnswered = (turn) => figures.showTurn(turn);

let keyInUse = settings.apiKey;
settings.onClose = () => {
  if (settings.apiKey !== keyInUse) poller.refresh();
  keyInUse = settings.apiKey;
};

poller.onState = ({ status, reason = null }, engine) => {
  const shown = status === "ok" && engine ? engine : status;
  const text = reason !== null && reason !== "" && reason !== status ? `${status}: ${reason}` : shown;
  const state = node("state");
  if (state.dataset.status !== undefined && state.dataset.status !== status) announcer.say(`Engine: ${text}`);
  state.dataset.status = status;
  state.dataset.state = shown;
  setText(node("state-text"), text);
};
poller.onSamples = (samples, before) => figures.show(samples, before);
poller.onNote = (text) => figures.showNote(text);
poller.onModel = (card, props) => {
  document.title = `${card.id} – s2moe`;
  setText(node("model-name"), card.id);
  const context = card.meta === null ? "" : `, up to ${card.meta.n_ctx.toLocaleString("en")} tokens of context`;
  setText(node("welcome-model"), `${card.id}${context}`);
  figures.showModel(card, props);
  settings.showDefaults(props?.default_generation_settings?.params ?? {});
};

node("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("keydown", (event) => {
  // Enter also ends the input of Chinese, Japanese or Korean; touch keyboards have no Shift+Enter.
  const plain = !event.shiftKey && !event.ctrlKey && !event.altKey && !event.isComposing;
  if (event.key !== "Enter" || !plain || matchMedia("(pointer: coarse)").matches) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !settings.isOpen) chat.stop();
});
node("stop").addEventListener("click", () => chat.stop());
node("new").addEventListener("click", () => {
  chat.clear();
  input.focus();
});
node("show-figures").addEventListener("click", () => showFigures(node("figures").hidden));
node("show-settings").addEventListener("click", () => settings.open());

showFigures(matchMedia(WIDE).matches);
poller.start();
