/** The part of Markdown that models write: code blocks, lists, headings, quotes, tables, bold, italics, inline
 * code. Text reaches the page as text nodes only; links and HTML stay text. */

import { copyButton, make } from "./dom.js";

const FENCE = /^([ \t]*)(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const ITEM_BEGUN = /^([-*+]|\d{1,9}[.)]?)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ROW = /^ {0,3}\|(.*)$/;
const TABLE_RULE = /^ {0,3}\|[ \t:|-]+$/;
const MAX_LIST_DEPTH = 6;
const MAX_INLINE_DEPTH = 4;

/** Renders a text that grows: finished blocks stay as they are, only the last one is made again. */
export class StreamingMarkdown {
  #parent;
  #settled = 0;
  #last = null;

  constructor(parent) {
    this.#parent = parent;
  }

  /** `text`: all of it; it begins with what was given before. `isWhole`: nothing will follow. */
  update(text, isWhole = false) {
    const blocks = blocksOf(text, this.#settled);
    if (!isWhole && mayBeItem(blocks)) blocks.pop();
    blocks.forEach((block, index) => {
      if (index === 0 && this.#last !== null) {
        this.#last = refresh(this.#last, block);
      } else {
        this.#last = { block, node: render(block) };
        this.#parent.append(this.#last.node);
      }
    });
    if (blocks.length > 0) this.#settled = blocks.at(-1).start;
  }
}

/** Whether the last block is half a mark, which may come to continue the list before it. */
function mayBeItem(blocks) {
  const [before, last] = blocks.slice(-2);
  return before?.kind === "list" && last?.kind === "text" && ITEM_BEGUN.test(last.lines.join("\n"));
}

/** A code block keeps its node while it grows: somebody may be about to press its button. */
function refresh(last, block) {
  if (block.kind === "code" && last.block.kind === "code" && block.language === last.block.language) {
    last.node.querySelector("code").textContent = block.lines.join("\n");
    return { block, node: last.node };
  }
  const node = render(block);
  last.node.replaceWith(node);
  return { block, node };
}

/** Blocks of `text` from offset `from`, which begins one: `{kind, start, lines | items}`. */
export function blocksOf(text, from = 0) {
  const blocks = [];
  let block = null;
  const begin = (kind, start, more) => {
    block = { kind, start, ...more };
    blocks.push(block);
  };
  for (let start = from; start < text.length; ) {
    const end = text.indexOf("\n", start);
    const line = text.slice(start, end === -1 ? text.length : end);
    if (block?.kind === "code" && !block.closed) addCode(block, line);
    else if (line.trim() !== "") continues(block, line) || beginBlock(begin, line, start);
    else if (block?.kind === "list") block.afterBlank = true;
    else block = null;
    start = end === -1 ? text.length : end + 1;
  }
  return blocks;
}

function addCode(block, line) {
  const bare = line.trim();
  if (bare.startsWith(block.fence) && bare.replaceAll(block.fence[0], "") === "") {
    block.closed = true;
    return;
  }
  let cut = 0;
  while (cut < block.indent && (line[cut] === " " || line[cut] === "\t")) cut += 1;
  block.lines.push(line.slice(cut));
}

/** Adds the line to the open block if it belongs there. */
function continues(block, line) {
  if (block === null || block.kind === "code" || FENCE.test(line) || HEADING.test(line)) return false;
  const item = RULE.test(line) ? null : ITEM.exec(line);
  if (block.kind === "list") {
    const afterBlank = block.afterBlank;
    block.afterBlank = false;
    if (item !== null) {
      const made = itemOf(item);
      if (made.indent === block.items[0].indent && made.ordered !== block.items[0].ordered) return false;
      block.items.push(made);
      return true;
    }
    if (RULE.test(line) || (afterBlank && !/^[ \t]/.test(line))) return false;
    block.items.at(-1).text += `\n${line.trim()}`;
    return true;
  }
  if (item !== null || RULE.test(line)) return false;
  const kind = QUOTE.test(line) ? "quote" : ROW.test(line) ? "table" : "text";
  if (kind !== block.kind) return false;
  block.lines.push(line);
  return true;
}

function beginBlock(begin, line, start) {
  let match;
  if ((match = FENCE.exec(line))) {
    const [language] = match[3].trim().split(/\s/);
    begin("code", start, { fence: match[2], indent: match[1].length, language, lines: [] });
  } else if ((match = HEADING.exec(line))) {
    begin("heading", start, { level: match[1].length, lines: [match[2]] });
  } else if (RULE.test(line)) {
    begin("rule", start, {});
  } else if ((match = ITEM.exec(line))) {
    begin("list", start, { items: [itemOf(match)], afterBlank: false });
  } else {
    begin(QUOTE.test(line) ? "quote" : ROW.test(line) ? "table" : "text", start, { lines: [line] });
  }
}

function itemOf([, blanks, mark, text]) {
  const ordered = mark.length > 1;
  const indent = blanks.replaceAll("\t", "    ").length;
  return { indent, ordered, number: ordered ? Number.parseInt(mark, 10) : 0, text };
}

function render(block) {
  switch (block.kind) {
    case "code":
      return renderCode(block);
    case "list":
      return renderList(block.items);
    case "heading":
      // Below the page's own headings, which go to the second level.
      return withInline(make(`h${Math.min(block.level + 2, 6)}`), block.lines[0]);
    case "rule":
      return make("hr");
    case "quote":
      return withInline(make("blockquote"), block.lines.map((line) => QUOTE.exec(line)[1]).join("\n"));
    case "table":
      return TABLE_RULE.test(block.lines[1] ?? "") ? renderTable(block.lines) : renderText(block.lines);
    default:
      return renderText(block.lines);
  }
}

function renderText(lines) {
  return withInline(make("p"), lines.join("\n"));
}

function renderCode(block) {
  const code = make("code", {}, block.lines.join("\n"));
  const copy = copyButton("Copy this code", () => code.textContent);
  const head = make("div", { class: "code-head" }, make("span", {}, block.language || "text"), copy);
  const label = block.language ? `Code, ${block.language}` : "Code";
  // in the order of the Tab key, since a long line scrolls
  const frame = make("pre", { tabindex: "0", role: "group", "aria-label": label }, code);
  return make("div", { class: "code" }, head, frame);
}

function renderList(items) {
  const root = listOf(items[0]);
  const open = [{ list: root, indent: items[0].indent }];
  for (const item of items) {
    while (open.length > 1 && item.indent < open.at(-1).indent) open.pop();
    const parent = open.at(-1).list.lastElementChild;
    if (item.indent > open.at(-1).indent + 1 && parent !== null && open.length < MAX_LIST_DEPTH) {
      open.push({ list: listOf(item), indent: item.indent });
      parent.append(open.at(-1).list);
    }
    open.at(-1).list.append(withInline(make("li"), item.text));
  }
  return root;
}

function listOf(first) {
  if (!first.ordered) return make("ul");
  return make("ol", { start: first.number === 1 ? false : String(first.number) });
}

function renderTable(lines) {
  const cells = (line) => ROW.exec(line)[1].replace(/\|[ \t]*$/, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => make("tr", {}, ...cells(line).map((cell) => withInline(make(tag), cell)));
  const head = make("thead", {}, row(lines[0], "th"));
  const body = make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  const table = make("table", {}, head, body);
  return make("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, table);
}

function withInline(node, text) {
  appendInline(node, text);
  return node;
}

/** `code`, **bold** and *italics*. A mark without its other half is text. Linear in the text: once no other
 * half was found for a mark, none is looked for again. */
function appendInline(node, text, depth = 0) {
  const hopeless = new Set();
  const marks = /`+|\*+/g;
  let plainFrom = 0;
  for (let match; (match = marks.exec(text)); ) {
    const mark = match[0][0] === "`" ? match[0] : match[0].slice(0, 2);
    const inside = match.index + mark.length;
    if (hopeless.has(mark) || depth >= MAX_INLINE_DEPTH) continue;
    if (mark[0] === "*" && !/\S/.test(text[inside] ?? "")) continue;
    const end = mark[0] === "`" ? endOfCode(text, inside, mark) : endOfEmphasis(text, inside, mark);
    if (end === -1) {
      hopeless.add(mark);
      continue;
    }
    if (match.index > plainFrom) node.append(text.slice(plainFrom, match.index));
    const inner = text.slice(inside, end);
    if (mark[0] === "`") {
      node.append(make("code", {}, inner));
    } else {
      const part = make(mark.length === 2 ? "strong" : "em");
      appendInline(part, inner, depth + 1);
      node.append(part);
    }
    plainFrom = end + mark.length;
    marks.lastIndex = plainFrom;
  }
  if (plainFrom < text.length) node.append(text.slice(plainFrom));
}

function endOfCode(text, from, mark) {
  const runs = /`+/g;
  runs.lastIndex = from;
  for (let match; (match = runs.exec(text)); ) {
    if (match[0] === mark) return match.index;
  }
  return -1;
}

function endOfEmphasis(text, from, mark) {
  const runs = /\*+/g;
  runs.lastIndex = from;
  for (let match; (match = runs.exec(text)); ) {
    const fits = mark.length === 2 ? match[0].length >= 2 : match[0].length !== 2;
    if (match.index > from && fits && /\S/.test(text[match.index - 1])) {
      return match.index + match[0].length - mark.length;
    }
  }
  return -1;
}
