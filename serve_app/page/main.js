// The frame around the views: the current view, its model, and messages about the server.

import { get, key, server } from "./api.js";
import { button, copy, errorNote, fill, goTo, h } from "./dom.js";
import * as links from "./state.js";

const VIEWS = {
  chat: ["Chat", () => import("./chat.js")],
  lens: ["Lens", () => import("./lens.js")],
  steer: ["Steer", () => import("./steer.js")],
  attention: ["Attention", () => import("./attention.js")],
  runs: ["Stored runs", () => import("./runs.js")],
  readouts: ["Probes", () => import("./readouts.js")],
};
const AGAIN_MS = 2000; // between two checks whether the server is back
const KEEP_MS = 250; // after a change

const place = document.getElementById("view");
const notices = document.getElementById("notices");
const nav = document.getElementById("nav");
const chooser = document.getElementById("model");
const asksKey = document.getElementById("key");
const made = new Map(); // name -> an opened view, which is kept while another is shown
const structures = new Map();
const writes = new Map(); // name -> how often a history entry has set the view's state
let shown = null;
let keeping = 0; // the timer that will write the state
let models = [];
let isKnown = false; // whether the server has listed its models: it may have none

/** The interface of views to the frame. */
const app = {
  model: () => chooser.value,
  info: () => models.find(({ id }) => id === chooser.value) ?? null,
  structure: (model = app.model()) => {
    if (!structures.has(model)) {
      const asked = get("v1/model/structure", { model });
      structures.set(model, asked);
      asked.catch(() => structures.delete(model));
    }
    return structures.get(model);
  },
  /** Writes the view's state into the address, shortly after the last change. */
  changed: () => {
    clearTimeout(keeping);
    keeping = setTimeout(keep, KEEP_MS);
  },
  /** Opens another view in a state, and starts it at a token. A link never does the latter, which makes the model work. */
  open: async (name, state, at) => {
    keep(); // going back then finds this view unchanged
    history.pushState(null, "", written(name, state));
    if (await show()) await made.get(name).begin?.(at);
  },
};

// A view whose tokens belong to another model shows that model's name.
const written = (name, state) => links.written(name, { model: app.model(), ...state });
const address = () => written(shown, made.get(shown)?.read());
const lineage = (name) => `${performance.timeOrigin} ${writes.get(name) ?? 0}`; // the same until the view is set again
let settled = null; // the fragment of the current view: another one is a link that will be shown

/** Writes the current view's state into the address. */
function keep() {
  if (!made.has(shown) || location.hash !== settled) return;
  history.replaceState(lineage(shown), "", address());
  settled = location.hash;
}

/** Shows the view and state of the address; returns whether no other was shown or written meanwhile. */
async function show() {
  const { hash } = location;
  const { view, state, damaged } = links.read();
  notice("link", damaged ? "The link is damaged: the view opens empty." : null);
  const one = await activate(view in VIEWS ? view : "chat");
  if (!one || location.hash !== hash) return false;
  settled = hash;
  if (state.model) offer(links.asText(state.model));
  const wentOn = history.state === lineage(shown); // since it was left
  if (Object.keys(state).length && !wentOn && location.hash !== address()) {
    one.write(state);
    writes.set(shown, (writes.get(shown) ?? 0) + 1);
    history.replaceState(lineage(shown), "", location.href);
  }
  const [name, was] = [shown, lineage(shown)];
  if (isKnown) await one.ready?.();
  return shown === name && lineage(name) === was;
}

/** Shows a view as it was left, creating it if needed; null if another was chosen meanwhile. */
async function activate(name) {
  for (const link of nav.children) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const hadFocus = place.contains(document.activeElement);
  if (shown !== name) made.get(shown)?.leave?.();
  shown = name;
  document.title = `${VIEWS[name][0]} – Vitrine`;
  place.setAttribute("aria-label", VIEWS[name][0]);
  try {
    const { view } = await VIEWS[name][1]();
    if (!made.has(name)) made.set(name, view(app)); // two may have waited for it
  } catch (error) {
    if (shown !== name) return null;
    const hint = "Reload the page if that goes on."; // the server may have newer modules
    place.replaceChildren(errorNote(Object.assign(error, { hint }), show, () => place));
    return null;
  }
  if (shown !== name) return null;
  const { element } = made.get(name);
  if (place.firstElementChild !== element) place.replaceChildren(element);
  if (hadFocus && document.activeElement === document.body) goTo(place);
  return made.get(name);
}

/** Lists the models; a repeated check (`isAgain`) with the same result changes nothing. */
async function know(isAgain = false) {
  let found;
  try {
    found = (await get("v1/models")).data;
  } catch (error) {
    if (error.status !== 401 && !isAgain) notice("models", errorNote(error, () => know(), () => chooser));
    return error.status !== 401 && soon();
  }
  const ids = (all) => JSON.stringify(all.map(({ id }) => id));
  const isSame = isAgain && isKnown && ids(found) === ids(models);
  [models, isKnown] = [found, true];
  if (isSame) return isServed() || soon();
  if (!document.getElementById("key-input")?.value) notice("key", null);
  structures.clear();
  offer(chooser.value);
  return made.get(shown)?.ready?.();
}

const isServed = () => models.some(({ id }) => id === chooser.value);

/** Offers the models, and selects one even if it is not served: no other model replaces it. */
function offer(wanted) {
  const isMissing = wanted && !models.some(({ id }) => id === wanted);
  fill(chooser, [...models.map(({ id }) => [id]), ...(isMissing ? [[wanted, isKnown ? `${wanted}, not served` : wanted]] : [])]);
  if (wanted) chooser.value = wanted;
  if (!isKnown) return;
  if (!isServed()) soon(); // it may be about to be loaded
  const none = models.length ? null : "No model is loaded: POST /models/load loads one.";
  notice("models", isMissing ? `The model ${wanted} is not served now: choose another one, or load it by POST /models/load.` : none);
}

/** Shows a message above the view under a name until it is replaced; null removes it. */
function notice(name, ...said) {
  const old = notices.querySelector(`[data-name=${name}]`);
  const hadFocus = old?.contains(document.activeElement);
  old?.remove();
  const made = said[0] === null ? null : h("div", { "data-name": name, class: "notice" }, ...said);
  if (made) notices.append(made);
  if (hadFocus) goTo(made?.querySelector("input, button") ?? place);
}

function askKey(label) {
  const typed = document.getElementById("key-input");
  if (typed?.value) return (typed.previousElementSibling.textContent = label);
  const input = h("input", { type: "password", autocomplete: "off", id: "key-input", required: true, pattern: "\\s*[\\x21-\\x7e]+\\s*", title: "letters, digits and signs of ASCII, without spaces" });
  const form = h(
    "form",
    {
      class: "row",
      onkeydown: (event) => event.key === "Escape" && (notice("key", null), asksKey.focus()),
      onsubmit: (event) => {
        event.preventDefault();
        key.set(input.value.trim());
        input.value = "";
        know();
      },
    },
    h("label", { for: "key-input" }, label),
    input,
    h("button", {}, "Use it"),
    key.get() ? button("Forget it", () => (key.set(""), notice("key", null))) : null,
    h("small", {}, "It stays in this tab and is not part of links."),
  );
  return notice("key", form);
}

let waiting = false;
server.addEventListener("nokey", () => askKey(key.get() ? "The server does not know this API key. Another one:" : "The server asks for an API key:"));
server.addEventListener("away", () => {
  if (waiting) return;
  waiting = true;
  notice("away", "The server does not respond. Your input stays; the web UI tries again while this tab is visible.");
  soon();
});
server.addEventListener("back", () => {
  if (!waiting) return;
  waiting = false;
  notice("away", null);
  know();
});

let timer = 0;
/** Checks later, while the page is visible, for a server that is away or a model that is not served. */
function soon() {
  clearTimeout(timer);
  timer = setTimeout(() => (document.hidden ? soon() : know(true)), AGAIN_MS);
}

nav.append(...Object.entries(VIEWS).map(([name, [title]]) => h("a", { href: `#${name}`, "data-view": name, onclick: keepState }, title)));

/** Opens a view as it was left. */
async function keepState(event) {
  if (event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  const name = event.currentTarget.dataset.view;
  keep();
  const state = made.get(name)?.read();
  history.pushState(lineage(name), "", state ? written(name, state) : `#${name}`);
  const { hash } = location;
  const one = await activate(name);
  if (one && location.hash === hash) settled = hash;
  if (isKnown) await one?.ready?.();
}

addEventListener("popstate", show);
asksKey.addEventListener("click", () => {
  askKey("API key of this server:");
  document.getElementById("key-input").focus();
});
document.getElementById("share").addEventListener("click", (event) => {
  keep();
  copy(location.href, event.currentTarget);
});
chooser.addEventListener("change", () => {
  offer(chooser.value);
  app.changed();
  made.get(shown)?.ready?.();
});

await Promise.all([show(), know()]);
document.documentElement.dataset.ready = "true";
