// Elements without markup: text is only inserted as text, which the Content-Security-Policy enforces as well.

/**
 * Makes an element. Of `props`, `class`, `role`, `for`, `aria-...` and `data-...` are set as attributes, `on...` listens,
 * others are properties. Of `children`, strings become text.
 */
export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (/^(class|role|for|list|aria-.*|data-.*)$/.test(name)) made.setAttribute(name, value === true ? "" : value);
    else made[name] = value;
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** A button that does not submit. */
export const button = (text, onclick, props = {}) => h("button", { type: "button", onclick, ...props }, text);

let numbers = 0;
/** An id that no other element has. */
export const newId = (stem) => `${stem}-${++numbers}`;

/** A form control with its label, and a hint below if there is one. */
export function field(label, control, hint) {
  control.id ||= newId("field");
  const below = hint ? h("small", { id: newId("hint") }, hint) : null;
  if (below) control.setAttribute("aria-describedby", below.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, below);
}

/** A checkbox with its label. */
export function check(label, props = {}) {
  const box = h("input", { type: "checkbox", ...props });
  return [box, h("label", { class: "check" }, box, label)];
}

/** A choice among `[value, text]`. */
export function choose(options, props = {}) {
  const made = h("select", props);
  fill(made, options);
  return made;
}

/** Replaces a select's options, and keeps the choice if it still exists; returns whether it does. */
export function fill(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => h("option", { value }, text ?? value)));
  const isKept = options.some(([value]) => String(value) === chosen);
  if (isKept) select.value = chosen;
  return isKept;
}

/** A table of texts and nodes, which scrolls separately if it is too wide. */
export function table(caption, heads, rows) {
  const head = h("thead", {}, h("tr", {}, ...heads.map((one) => h("th", { scope: "col" }, one))));
  const body = h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", {}, cell)))));
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": caption }, h("table", {}, h("caption", {}, caption), head, body));
}

/** The text of an empty place. */
export const empty = (...text) => h("p", { class: "empty" }, ...text);

/**
 * The details beside a view: `{ element, show(...parts) }`; without parts, the hint is shown. A narrow window shows them
 * as a sheet at its bottom, which Escape and a button close.
 */
export function detailPane(label, hint, onclose = () => {}) {
  const shown = h("div");
  const close = button("Close", () => (show(), goTo(before), onclose()), { class: "close" });
  const element = h("aside", { "aria-label": label }, close, shown);
  let before = null; // what had the focus
  function show(...parts) {
    if (!element.contains(document.activeElement)) before = document.activeElement;
    shown.replaceChildren(...(parts.length ? parts : [empty(hint)]));
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && !event.defaultPrevented && close.checkVisibility() && close.click());
  show();
  return { element, show };
}

/** An error in its place, with advice and a button to try again, which passes the focus to `home()`. */
export function errorNote(error, again, home) {
  const text = error?.message ?? String(error);
  const retry = async () => {
    const place = note.parentElement;
    await keepingFocus(again, home);
    // A second failure can be retried again.
    if (!note.isConnected && [document.body, home()].includes(document.activeElement)) goTo(place.querySelector(".error button"));
  };
  const note = h("div", { class: "error", role: "alert" }, h("p", {}, text), error?.hint ? h("p", {}, error.hint) : null, again ? button("Try again", retry) : null);
  return note;
}

/** Moves the keyboard focus, and a screen reader, to an element. */
export function goTo(element) {
  if (element?.tabIndex < 0) element.tabIndex = -1; // otherwise Tab already goes there
  element?.focus({ preventScroll: true });
}

/** Calls `act`; if the focused control disappears, now or later, the focus moves to `next()`. */
export async function keepingFocus(act, next) {
  const had = document.activeElement;
  const keep = () => !had.isConnected && document.activeElement === document.body && goTo(next());
  const done = act();
  keep();
  const result = await done;
  keep();
  return result;
}

/** Calls `paint` once in the next frame, however often it is requested. */
export function perFrame(paint) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      paint();
    });
  };
}

// Characters that are invisible, or that reverse the text after them.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;

const numbered = (one) => `‹${one.codePointAt(0).toString(16).padStart(4, "0")}›`;

/** A token's visible text: control characters as their number, a new line as a sign. */
export function visible(text) {
  const seen = text.replace(HIDDEN, numbered);
  return seen.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}

/** The same for a single token, whose spaces and marks would be invisible alone. */
export const named = (text) => visible(text).replace(/^[\p{Z}\p{M}]+$/u, (all) => [...all].map((one) => (one === " " ? "␣" : numbered(one))).join("")) || "(empty)";

/** The same in quotation marks, for labels. */
export const quoted = (text) => `“${named(text)}”`;

/** A share of 1 in percent. */
export function percent(share) {
  if (share > 0 && share < 1e-5) return "< 0.001%";
  return `${share >= 0.0995 || !share ? (100 * share).toFixed(0) : (100 * share).toPrecision(2)}%`;
}

/** A number in readable form. */
export const number = (value, digits = 3) => (Number.isFinite(value) ? Number(value.toPrecision(digits)).toString() : "–");

/** Copies a text, and shows that on the button. */
export async function copy(text, on) {
  const said = (on.dataset.title ??= on.textContent);
  try {
    await navigator.clipboard.writeText(text);
    on.textContent = "Copied";
  } catch {
    on.textContent = "Not allowed: copy by hand";
  }
  setTimeout(() => (on.textContent = said), 1500);
}
