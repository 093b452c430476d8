// `<lens-grid>`: layers by tokens. Only the columns in view are elements, so that thousands of tokens scroll smoothly.

import { h, named, newId, perFrame } from "./dom.js";
import { paint } from "./scales.js";

const WIDTH = 78; // pixels of a column
const HEAD = 26; // of its token, and
const HEIGHT = 20; // of a cell, as in the style sheet
const MARGIN = 4; // columns beyond the visible ones

/**
 * Set `grid.show({ texts, layers, cell, colours, need })`: `cell(position, layer)` is `{ text, said }`, the text and the
 * label, or undefined if it is not known yet; `need(from, to)` is called with the visible columns.
 * Events: `cell` with `detail.{position, layer}`, and `patch` with `detail.{from, to}` when a cell is dropped on another.
 */
class LensGrid extends HTMLElement {
  #of = null;
  #columns = new Map(); // position -> elements
  #at = [0, 0]; // position and row of the keyboard focus
  #chosen = null;
  #dragged = null;
  #isOld = false; // whether the drawn columns are outdated
  #stem = newId("cell");
  #layout = perFrame(() => this.#place());

  show(of) {
    this.#of = of;
    this.#columns.clear();
    this.#chosen = null;
    this.#at = [0, 0];
    const names = of.layers.map((layer) => h("span", {}, String(layer)));
    this.rail = h("div", { class: "rail", "aria-hidden": "true" }, h("span", {}, "layer"), ...names);
    this.inner = h("div", { class: "columns", role: "presentation" });
    this.body = h(
      "div",
      { class: "body", role: "grid", tabIndex: 0, "aria-label": "Lens: a row for each token, a cell for each layer", "aria-rowcount": of.texts.length, "aria-colcount": of.layers.length + 1 },
      this.inner,
    );
    this.inner.style.width = `${of.texts.length * WIDTH}px`;
    this.inner.style.height = `${HEAD + of.layers.length * HEIGHT}px`;
    this.body.addEventListener("scroll", this.#layout, { passive: true });
    this.body.onkeydown = (event) => this.#press(event);
    this.body.onfocus = () => this.#go(...this.#at, false);
    this.body.onpointerdown = (event) => this.#grab(event);
    this.replaceChildren(this.rail, this.body);
    new ResizeObserver(this.#layout).observe(this.body);
    this.refresh();
  }

  /** Redraws the visible part after cells or colours have changed; until then the old cells still react to presses. */
  refresh() {
    this.#isOld = true;
    this.#layout();
  }

  /** Scrolls to a token. */
  scrollTo(position) {
    this.body.scrollLeft = Math.max(position - 3, 0) * WIDTH;
    this.#layout();
  }

  #place() {
    if (!this.#of || !this.body.isConnected) return;
    const { texts, need } = this.#of;
    const first = Math.max(Math.floor(this.body.scrollLeft / WIDTH) - MARGIN, 0);
    const end = Math.min(Math.ceil((this.body.scrollLeft + this.body.clientWidth) / WIDTH) + MARGIN, texts.length);
    for (const [position, column] of this.#columns) {
      if (!this.#isOld && position >= first && position < end) continue;
      column.remove();
      this.#columns.delete(position);
    }
    this.#isOld = false;
    for (let position = first; position < end; position++) {
      if (this.#columns.has(position)) continue;
      const column = this.#column(position);
      this.#columns.set(position, column);
      this.inner.append(column);
    }
    this.#mark();
    need(first, end);
  }

  #column(position) {
    const { texts, layers, count } = this.#of;
    const head = h("span", { role: "rowheader", class: position < count ? "prompt" : "answer", title: named(texts[position]) }, named(texts[position]));
    const column = h("div", { role: "row", class: "column", "aria-rowindex": position + 1 }, head, ...layers.map((_, row) => this.#cell(position, row)));
    column.style.left = `${position * WIDTH}px`;
    column.dataset.position = position;
    return column;
  }

  #cell(position, row) {
    const { layers, cell, colours, texts } = this.#of;
    const one = cell(position, layers[row]);
    const made = h("span", { role: "gridcell", id: `${this.#stem}-${position}-${row}`, "data-row": row }, one ? named(one.text) : "·");
    made.setAttribute("aria-label", `layer ${layers[row]} after ${named(texts[position])}: ${one?.said ?? "not read yet"}`);
    if (one) paint(made, colours(one));
    if (this.#chosen?.[0] === position && this.#chosen[1] === row) made.classList.add("chosen");
    return made;
  }

  #press(event) {
    const [position, row] = this.#at;
    const page = Math.max(Math.floor(this.body.clientWidth / WIDTH) - 1, 1);
    const moves = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1], PageDown: [page, 0], PageUp: [-page, 0], Home: [-Infinity, 0], End: [Infinity, 0] };
    if (event.key === "Enter" || event.key === " ") this.choose(position, row);
    else if (event.key in moves) this.#go(position + moves[event.key][0], row + moves[event.key][1]);
    else return;
    event.preventDefault();
  }

  #go(position, row, scrolls = true) {
    this.#at = [Math.min(Math.max(position, 0), this.#of.texts.length - 1), Math.min(Math.max(row, 0), this.#of.layers.length - 1)];
    const [here, there] = this.#at;
    if (scrolls) {
      const left = here * WIDTH;
      if (left < this.body.scrollLeft) this.body.scrollLeft = left;
      if (left + WIDTH > this.body.scrollLeft + this.body.clientWidth) this.body.scrollLeft = left + WIDTH - this.body.clientWidth;
    }
    this.#place();
    if (scrolls) this.#find(here, there)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** Marks the keyboard position if it is among the elements. */
  #mark() {
    this.querySelector(".at")?.classList.remove("at");
    const cell = this.#find(...this.#at);
    cell?.classList.add("at");
    if (cell) this.body.setAttribute("aria-activedescendant", cell.id);
    else this.body.removeAttribute("aria-activedescendant");
  }

  #find = (position, row) => this.#columns.get(position)?.querySelector(`[data-row="${row}"]`);

  /** Selects a cell, and scrolls to it if `scrolls`. */
  choose(position, row, scrolls = false) {
    row = Math.min(row, this.#of.layers.length - 1);
    if (scrolls) this.#go(position, row);
    this.querySelector(".chosen")?.classList.remove("chosen");
    this.#chosen = this.#at = [position, row];
    this.#find(position, row)?.classList.add("chosen");
    this.#mark();
    this.dispatchEvent(new CustomEvent("cell", { detail: { position, layer: this.#of.layers[row] } }));
  }

  #under(event) {
    const cell = document.elementFromPoint(event.clientX, event.clientY)?.closest("[role=gridcell], [role=rowheader]");
    if (!cell || !this.contains(cell)) return null;
    const position = Number(cell.closest(".column").dataset.position);
    return { cell, position, row: cell.dataset.row === undefined ? null : Number(cell.dataset.row) };
  }

  /** A press on a cell selects it or, dragged to another token by a mouse or pen, patches that token. */
  #grab(event) {
    const from = this.#under(event);
    if (!from || from.row === null || event.button) return;
    const begun = [event.clientX, event.clientY];
    const move = (now) => {
      const far = Math.hypot(now.clientX - begun[0], now.clientY - begun[1]);
      if (event.pointerType === "touch" || (!this.#dragged && far < 6)) return;
      now.preventDefault();
      this.#dragged = from;
      this.classList.add("dragging");
      this.querySelector(".target")?.classList.remove("target");
      const target = this.#under(now);
      if (target && target.position !== from.position) target.cell.classList.add("target");
    };
    const end = (last) => {
      for (const [kind, act] of [["pointermove", move], ["pointerup", end], ["pointercancel", end]]) removeEventListener(kind, act);
      this.classList.remove("dragging");
      this.querySelector(".target")?.classList.remove("target");
      const target = last.type === "pointerup" ? this.#under(last) : null;
      const was = this.#dragged;
      this.#dragged = null;
      if (!was && target?.position === from.position && target.row === from.row) this.choose(from.position, from.row);
      if (!was || !target || (target.position === from.position && target.row === from.row)) return;
      const layer = (row) => this.#of.layers[row];
      const to = { position: target.position, layer: layer(target.row ?? from.row) };
      this.dispatchEvent(new CustomEvent("patch", { detail: { from: { position: from.position, layer: layer(from.row) }, to } }));
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", end);
    addEventListener("pointercancel", end);
  }
}

customElements.define("lens-grid", LensGrid);
