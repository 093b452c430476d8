// Attention: where each token looks, by head. The heads of a layer side by side, and one of them large.

import { isAbort } from "./api.js";
import { button, empty, errorNote, field, h, percent, quoted } from "./dom.js";
import { layers, source } from "./forms.js";
import { complete, continuing, isTooLarge, rows, rowsBody, span, stored, storedQuery, tokenized } from "./recompute.js";
import { legend, onTheme, scale } from "./scales.js";
import { asNumber, asText } from "./state.js";
import { onLook, pinning } from "./tokens.js";
import "./code.js";

const SMALL = 96; // pixels of a small picture
const LARGE = 480;
const ATTENTION = scale({ title: "attention", root: true });

export function view(app) {
  const from = source({ text: "When Mary and John went to the store, John gave a drink to", max: 0, onchange: app.changed });
  const layer = layers(false);
  const run = h("button", { class: "main" }, "Show the heads");
  const stop = button("Stop", () => running?.abort(), { hidden: true });
  const trouble = h("div");
  const status = h("p", { class: "wait", role: "status" });
  const shown = h("div", {}, empty("Give a text. Each small picture is a head: a row for each token, and the darker a square, the more that token looks there."));
  const code = document.createElement("request-code");
  let running = null;
  let text = null;
  let recorded = null; // a stored run `{ session, run }` in place of a text
  let pattern = null; // { first, heads, at(head, row): shares }
  let head = 0;
  const pins = pinning(app.changed);

  const form = h(
    "form",
    { noValidate: true, onsubmit: (event) => (event.preventDefault(), begin()) },
    from.element,
    h("div", { class: "row" }, field("Layer", layer.element), run, stop),
  );
  const element = h("section", { "aria-label": "Attention" }, form, trouble, status, shown, code);
  from.element.addEventListener("input", () => ((recorded = null), pins.write()));
  layer.element.addEventListener("change", () => {
    app.changed();
    if (pattern) begin();
  });
  onTheme(() => pattern && draw());

  async function begin() {
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    const asked = recorded ? from.read() : from.asked();
    trouble.replaceChildren();
    [run.disabled, stop.hidden] = [true, false];
    try {
      const { layers: count } = await app.structure();
      if (layer.element.options.length !== count) layer.set(count);
      const point = `layers.${layer.element.value}.attention.weights`;
      status.textContent = "Reading the heads…";
      if (recorded) await fromStored(point, signal);
      else await fromText(asked, point, signal);
      head = Math.min(head, pattern.heads - 1);
      draw();
      app.changed();
    } catch (error) {
      if (!isAbort(error)) trouble.replaceChildren(errorNote(explained(error), begin));
    } finally {
      [run.disabled, stop.hidden, status.textContent] = [false, true, ""];
    }
  }

  function explained(error) {
    if (error.code === "no_attention_patterns") error.hint = "Start the server with attention=eager, or load the model so by POST /models/load.";
    return error;
  }

  async function fromText(asked, point, signal) {
    text = await tokenized(app.model(), asked, signal);
    if (!asked.ids && asked.max_tokens) {
      const body = continuing(app.model(), text.ids, asked);
      code.note("The answer", { method: "POST", path: "v1/completions", body });
      const { ids, texts } = text;
      const add = (tokens) => (ids.push(...tokens.map(({ id }) => id)), texts.push(...tokens.map((one) => one.text)));
      await complete({ ...body, prompt: [...ids] }, add, signal);
    }
    const { rows: found, first } = await fitting(point, signal);
    pattern = { first, heads: found[0].length, at: (which, row) => found[row][which] };
    code.note("The patterns", { method: "POST", path: "v1/completions", body: rowsBody(app.model(), text.ids, [point], span(first, text.ids.length)) });
  }

  /** The pattern of all tokens, or of as many of the last ones as the server puts into an answer. */
  async function fitting(point, signal) {
    const total = text.ids.length;
    for (let first = 0; ; first = Math.ceil((first + total) / 2)) {
      try {
        const found = await rows(app.model(), text.ids, [point], span(first, total), signal, undefined, true);
        return { rows: Object.values(found)[0], first };
      } catch (error) {
        if (!isTooLarge(error) || first >= total - 1) throw error;
      }
    }
  }

  async function fromStored(point, signal) {
    const where = { session_id: recorded.session, run_id: recorded.run };
    const { tensors: found } = await stored(where, [point], signal);
    const ids = [...found.token_id.values];
    text = await tokenized(app.model(), { ids }, signal);
    const { shape, values } = found[point];
    const [, heads, widest] = shape;
    const lengths = found[`${point}.lengths`].values;
    const start = (which, row) => (row * heads + which) * widest;
    pattern = { first: found.position.values[0], heads, at: (which, row) => values.subarray(start(which, row), start(which, row) + lengths[row]) };
    code.note("The stored pattern", storedQuery(where, [point]));
  }

  function draw() {
    const count = text.ids.length - pattern.first;
    const strip = document.createElement("token-strip");
    strip.setAttribute("aria-label", "Tokens; the one you look at shows where it looks");
    strip.set(text.texts.map((one) => ({ text: one })));
    const large = picture(head, count, LARGE, 2048);
    const mark = h("div", { class: "mark" }); // the row of the token that is looked at
    const said = h("p", { class: "from", role: "status" });
    const title = h("h2", {}, `Layer ${layer.element.value}, head ${head}`);
    const smalls = span(0, pattern.heads).map((which) => {
      const made = h("button", { type: "button", "aria-pressed": String(which === head), onclick: () => pick(which) }, picture(which, count, SMALL, 2 * SMALL), `head ${which}`);
      return made;
    });
    function pick(which) {
      head = which;
      smalls.forEach((one, i) => one.setAttribute("aria-pressed", String(i === which)));
      picture(which, count, LARGE, 2048, large);
      title.textContent = `Layer ${layer.element.value}, head ${which}`;
      look(strip.pinned >= 0 ? strip.pinned : text.ids.length - 1);
      app.changed();
    }
    function look(at) {
      const row = at - pattern.first;
      mark.hidden = row < 0;
      if (row < 0) return said.replaceChildren(`Token ${at} is before those that fit into an answer.`);
      Object.assign(mark.style, { top: `${(100 * row) / count}%`, height: `${100 / count}%` });
      const shares = pattern.at(head, row);
      strip.colour((_, i) => (i < shares.length ? ATTENTION.colour(shares[i]) : null));
      const most = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 3);
      return said.replaceChildren(`${quoted(text.texts[at])} (${at}) looks at ${most.map((i) => `${quoted(text.texts[i])} (${i}) ${percent(shares[i])}`).join(", ")}`);
    }
    onLook(strip, (index) => index >= 0 && look(index));
    pins.watch([strip]);
    large.addEventListener("pointermove", (event) => {
      const row = Math.floor((event.offsetY / large.clientHeight) * count);
      if (strip.pinned < 0) look(Math.max(0, Math.min(row, count - 1)) + pattern.first);
    });
    const cut = pattern.first ? h("p", { class: "from" }, `The patterns of the last ${count} tokens: those of all ${text.ids.length} do not fit into an answer (max_inline_values).`) : null;
    const figure = h("figure", {}, h("div", { class: "large" }, large, mark), h("figcaption", {}, "Down: the token that looks. Across: the tokens that it looks at."));
    shown.replaceChildren(
      ...[cut, h("div", { class: "heads" }, ...smalls), title, legend(ATTENTION), said, h("div", { class: "beside" }, figure, strip)].filter(Boolean),
    );
    look(text.ids.length - 1);
    pins.restore();
  }

  /** A head as a picture of at most `most` squares a side: a row for each token that looks, a column for each looked at. */
  function picture(which, count, size, most, canvas = h("canvas", { role: "img" })) {
    const total = text.ids.length;
    const [width, height] = [Math.min(total, most), Math.min(count, most)];
    Object.assign(canvas, { width, height });
    canvas.setAttribute("aria-label", `Head ${which}: rows are tokens, columns where they look`);
    Object.assign(canvas.style, { width: `${size}px`, aspectRatio: `${total} / ${count}` });
    const largest = new Float32Array(width * height); // of the shares that fall into a square
    for (let row = 0; row < count; row++) {
      const shares = pattern.at(which, row);
      const start = Math.floor((row * height) / count) * width;
      for (let i = 0; i < shares.length; i++) {
        const at = start + Math.floor((i * width) / total);
        if (shares[i] > largest[at]) largest[at] = shares[i];
      }
    }
    const colours = Array.from({ length: 256 }, (_, i) => ATTENTION.rgb((i / 255) ** 2));
    const image = new ImageData(width, height);
    image.data.fill(255);
    largest.forEach((share, at) => image.data.set(colours[Math.round(255 * Math.sqrt(Math.min(share, 1)))], 4 * at));
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  return {
    element,
    ready: () => layer.know(app, trouble),
    read: () => {
      const { ids, count, ...rest } = from.read();
      const whole = recorded ? { session: recorded.session, run: recorded.run } : ids ? { ids, count } : {};
      return { ...rest, ...whole, layer: layer.element.value, head, ...pins.read() };
    },
    write: (state) => {
      from.write(state);
      recorded = state.run ? { session: asText(state.session), run: asText(state.run) } : null;
      head = asNumber(state.head, 0);
      pins.write(state);
      if (state.layer !== undefined && Number.isInteger(Number(state.layer))) layer.element.replaceChildren(h("option", { value: String(Number(state.layer)) }, `layer ${Number(state.layer)}`));
      pattern = null;
      shown.replaceChildren(empty("Press “Show the heads”."));
    },
    begin,
  };
}
