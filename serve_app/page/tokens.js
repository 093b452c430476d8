// `<token-strip>`: an answer as its tokens, each of which can be inspected and pinned.

import { detailPane, h, named, newId, perFrame, percent, visible } from "./dom.js";
import { paint } from "./scales.js";
import { asNumber } from "./state.js";

const BLOCK = 200; // tokens of a block without a new line; up to twice as many if no token starts with a space

/**
 * A token: `{ text, id?, logprob?, top?: [{ text, logprob }], part? }`; `part` is "prompt" or "answer".
 * The strip is a list box: arrow keys move between tokens, Enter pins one. Each paragraph of tokens is a block, so that
 * the browser only lays out the last block while tokens arrive.
 * Events: `look` (hovered or focused) and `pin`, each with `detail.index`.
 */
class TokenStrip extends HTMLElement {
  tokens = [];
  text = ""; // of the whole answer: a character may span several tokens
  pinned = -1;
  #at = -1; // the keyboard position
  #drawn = []; // the elements
  #block = null; // the last
  #held = 0; // tokens in it
  #colour = null;
  #stem = newId("token");
  #draw = perFrame(() => this.#drawNew());

  connectedCallback() {
    this.setAttribute("role", "listbox");
    this.setAttribute("aria-orientation", "horizontal");
    if (!this.hasAttribute("aria-label")) this.setAttribute("aria-label", "Tokens");
    this.tabIndex = 0;
    this.onkeydown = (event) => this.#press(event);
    this.onclick = (event) => this.#byPointer(event, (index) => (this.#go(index, false), this.pin(index === this.pinned ? -1 : index)));
    this.onpointerover = (event) => this.#byPointer(event, (index) => this.#tell("look", index));
    this.onfocus = () => this.tokens.length && this.#go(this.#at < 0 ? Math.max(this.pinned, 0) : this.#at, false);
    this.onblur = () => this.#mark(this.#at, "at", false);
  }

  /** Replaces the tokens. */
  set(tokens) {
    this.tokens = [];
    this.replaceChildren();
    this.#drawn = [];
    this.#block = null;
    this.#at = this.pinned = -1;
    this.removeAttribute("aria-activedescendant");
    this.add(tokens);
  }

  /** Appends tokens and their text in the next frame. */
  add(tokens, text = "") {
    this.tokens.push(...tokens);
    this.text += text;
    this.#draw();
  }

  /** Colours each token by `colours(token, index)`, which returns a colour of a scale or null. */
  colour(colours) {
    this.#colour = colours;
    this.#drawNew();
    this.repaint();
  }

  /** Recolours the tokens from `first` to before `last` after their numbers have changed. */
  repaint(first = 0, last = Infinity) {
    for (let i = first; i < Math.min(last, this.#drawn.length); i++) paint(this.#drawn[i], this.#colour?.(this.tokens[i], i));
  }

  /** Pins a token; -1 for none. */
  pin(index) {
    this.#drawNew();
    this.#mark(this.pinned, "pinned", false);
    this.#drawn[this.pinned]?.setAttribute("aria-selected", "false");
    this.pinned = index;
    this.#mark(index, "pinned", true);
    this.#drawn[index]?.setAttribute("aria-selected", "true");
    this.#tell("pin", index);
  }

  #drawNew() {
    while (this.#drawn.length < this.tokens.length) {
      const index = this.#drawn.length;
      if (this.#beginsBlock(index)) {
        this.#block = h("div", { role: "presentation" });
        this.#held = 0;
        this.append(this.#block);
      }
      this.#held += 1;
      this.#drawn.push(this.#token(index));
      this.#block.append(this.#drawn[index]);
    }
  }

  #beginsBlock(index) {
    if (!this.#block || this.tokens[index - 1].text.includes("\n")) return true;
    return this.#held >= BLOCK && (/^\s/.test(this.tokens[index].text) || this.#held >= 2 * BLOCK);
  }

  #token(index) {
    const token = this.tokens[index];
    const share = token.logprob === undefined ? "" : `, ${percent(Math.exp(token.logprob))}`;
    const made = h("span", { role: "option", class: token.part ?? "answer", id: `${this.#stem}-${index}`, "aria-selected": "false", index });
    made.setAttribute("aria-label", `${named(token.text)}${share}`);
    made.textContent = visible(token.text);
    paint(made, this.#colour?.(token, index));
    return made;
  }

  #press(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.#line(1), ArrowUp: this.#line(-1), Home: -Infinity, End: Infinity };
    if (event.key === "Enter" || event.key === " ") {
      if (this.#at >= 0) this.pin(this.#at === this.pinned ? -1 : this.#at);
    } else if (event.key === "Escape" && this.pinned >= 0) {
      this.pin(-1);
    } else if (event.key in steps && this.tokens.length) {
      this.#go(Math.min(Math.max(this.#at + steps[event.key], 0), this.tokens.length - 1));
    } else return;
    event.preventDefault();
  }

  /** The distance in tokens to the one below or above. */
  #line(way) {
    const here = this.#drawn[Math.max(this.#at, 0)]?.getBoundingClientRect();
    for (let i = this.#at + way; here && i >= 0 && i < this.#drawn.length; i += way) {
      const other = this.#drawn[i].getBoundingClientRect();
      if (other.top !== here.top && (way > 0 ? other.right > here.left : other.left <= here.left)) return i - this.#at;
    }
    return 0;
  }

  #go(index, scrolls = true) {
    this.#drawNew();
    this.#mark(this.#at, "at", false);
    this.#at = index;
    this.#mark(index, "at", true);
    this.setAttribute("aria-activedescendant", `${this.#stem}-${index}`);
    if (scrolls) this.#drawn[index].scrollIntoView({ block: "nearest" });
    this.#tell("look", index);
  }

  #mark(index, name, on) {
    this.#drawn[index]?.classList.toggle(name, on);
  }

  #byPointer(event, act) {
    const index = event.target.closest?.("[role=option]")?.index;
    if (index !== undefined) act(index);
  }

  #tell(kind, index) {
    this.dispatchEvent(new CustomEvent(kind, { detail: { index }, bubbles: true }));
  }
}

customElements.define("token-strip", TokenStrip);

/** A named section for an answer: `[section, strip]`. */
export function answerPane(name, heading = "h2") {
  const strip = document.createElement("token-strip");
  strip.setAttribute("aria-label", `${name}: tokens of the completion`);
  return [h("section", { "aria-label": name }, h(heading, {}, name), strip), strip];
}

export const SAME = "Both completions are the same.";

/** Says where the answers of two strips begin to differ. */
export function parting(one, other) {
  const same = one.tokens.findIndex((token, i) => token.id !== other.tokens[i]?.id);
  if (same < 0 && one.tokens.length === other.tokens.length) return SAME;
  return `The completions differ from token ${same < 0 ? one.tokens.length : same} on.`;
}

/** A button that opens an answer as text to read and copy, in its own direction; null if there is none. */
export function asPlain(strip) {
  const text = h("div", { class: "plain", dir: "auto" });
  return strip.text ? h("details", { ontoggle: () => (text.textContent = strip.text) }, h("summary", {}, "Show as text"), text) : null;
}

/** The pinned tokens of a view's strips, in the strips' order, as stored in a link; `onchange` is called on changes. */
export function pinning(onchange) {
  let pinned = [];
  let shown = [];
  return {
    /** Replaces the strips. */
    watch: (strips) => {
      shown = strips;
      strips.forEach((strip, i) => strip.addEventListener("pin", ({ detail }) => {
        if (shown[i] !== strip) return;
        pinned[i] = detail.index;
        onchange();
      }));
    },
    /** Pins the requested tokens that exist. */
    restore: () => shown.forEach((strip, i) => pinned[i] in strip.tokens && pinned[i] !== strip.pinned && strip.pin(pinned[i])),
    read: () => (pinned.some((index) => index >= 0) ? { pinned: Array.from(pinned, (index) => index ?? -1) } : {}),
    write: (state = {}) => (pinned = Array.isArray(state.pinned) ? state.pinned.slice(0, 2).map((index) => asNumber(index, -1)) : []),
  };
}

/** Calls `act(index)` with the hovered or focused token, and with the pinned one while there is one. */
export function onLook(strip, act) {
  strip.addEventListener("look", ({ detail }) => strip.pinned < 0 && act(detail.index));
  strip.addEventListener("pin", ({ detail }) => act(detail.index));
}

/** The entropy of a token's distribution in bits, with all tokens but the top ones as one: a lower bound. */
export function entropy(token) {
  if (!token.top?.length) return NaN;
  const shares = token.top.map(({ logprob }) => Math.exp(logprob));
  const rest = 1 - shares.reduce((sum, share) => sum + share, 0);
  if (rest > 1e-9) shares.push(rest);
  return shares.reduce((sum, share) => sum - (share > 0 ? share * Math.log2(share) : 0), 0);
}

/** The details of a strip's token, beside the strip. */
const unpin = () => document.querySelectorAll("token-strip").forEach((strip) => strip.pinned >= 0 && strip.pin(-1));
export const tokenPane = () => detailPane("Token", "Point at a token, or go there with the arrow keys. A click or Enter pins it.", unpin);

/** What that shows of a token: nothing if there is none. */
export function details(token, index, scores = []) {
  if (!token) return [];
  const facts = [["Position", String(index)]];
  if (token.id !== undefined) facts.push(["Token id", String(token.id)]);
  if (token.logprob !== undefined) facts.push(["Probability", percent(Math.exp(token.logprob))]);
  if (token.top?.length) facts.push(["Entropy, at least", `${entropy(token).toFixed(2)} bits`]);
  return [
    h("h2", { class: "token-name" }, named(token.text)),
    h("dl", {}, ...[...facts, ...scores].flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    ...(token.top?.length ? [ranking("Most likely here", token.top, token.text)] : []),
  ];
}

/** Tokens with their probabilities as bars. */
export function ranking(title, top, chosen) {
  const row = ({ text, logprob }) => {
    const share = Math.exp(logprob);
    const bar = h("i", { "aria-hidden": "true" });
    bar.style.width = `${Math.max(100 * share, 0.5)}%`;
    const name = h("span", {}, named(text));
    return h("li", { class: text === chosen ? "chosen" : null }, bar, name, h("b", {}, percent(share)));
  };
  return h("div", {}, h("h3", {}, title), h("ol", { class: "ranking" }, ...top.map(row)));
}
