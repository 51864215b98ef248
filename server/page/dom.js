/** Building nodes without ever parsing text as HTML. */

/** make("p", {class: "note", hidden: true}, "text", node): attributes by name; false leaves one out. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** Touches the node only where something changed, so that a figure that stays costs no layout. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A button that copies what `read` returns, and says so on itself for a moment. */
export function copyButton(label, read) {
  const button = make("button", { type: "button", class: "quiet", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    setText(button, (await copyText(read())) ? "Copied" : "Not copied");
    setTimeout(() => setText(button, "Copy"), 1500);
  });
  return button;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // no clipboard API over plain HTTP from another machine
  }
}

function copyBySelection(text) {
  const before = document.activeElement;
  const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  before?.focus();
  return copied;
}
