/** Swagger UI on the server's description of its own API. Paths are relative, so that the page also works behind a
 * path of a proxy. */

const KEY_STORE = "s2moe.api_key"; // as of the chat page: a key that was given there is known here
const DOCUMENT = new URL("openapi.json", document.baseURI).href;

const form = document.querySelector("#key-form");
const note = document.querySelector("#note");

// The policy of the page refuses HTML from text unless this allows it. Swagger UI makes some, which it has cleaned
// before, of descriptions; what would run as code stays refused.
globalThis.trustedTypes?.createPolicy("default", { createHTML: (html) => html });

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_STORE, form.elements.key.value);
  start();
});
start();

async function start() {
  let response;
  try {
    response = await fetch(DOCUMENT, { method: "HEAD", headers: keyHeaders() });
  } catch {
    note.textContent = "The server does not answer. Is it still running?";
    return;
  }
  form.hidden = response.status !== 401;
  if (response.ok) show();
  else if (form.hidden) note.textContent = `The server answers ${response.status}.`;
  else note.textContent = "This server asks for its API key. It is kept in this tab only.";
}

function show() {
  note.textContent = "";
  SwaggerUIBundle({
    url: DOCUMENT,
    domNode: document.querySelector("#api"),
    presets: [SwaggerUIBundle.presets.apis],
    layout: "BaseLayout",
    deepLinking: true,
    validatorUrl: null, // it is on another host
    requestInterceptor: (request) => {
      request.headers = { ...keyHeaders(), ...request.headers };
      return request;
    },
  });
}

function keyHeaders() {
  const key = sessionStorage.getItem(KEY_STORE);
  return key ? { Authorization: `Bearer ${key}` } : {};
}
