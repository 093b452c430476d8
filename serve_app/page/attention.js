// Attention: the tokens that each token attends to. The heads of a layer side by side, and one of them large.

import { post } from "./api.js";
import { empty, field, h, named, percent, quoted } from "./dom.js";
import { layers, source } from "./forms.js";
import { answered, isTooLarge, rowsBody, span, stored, storedQuery, textsOf } from "./recompute.js";
import { legend, onTheme, scale } from "./scales.js";
import { asNumber, asText } from "./state.js";
import { onLook, pinning } from "./tokens.js";
import { work } from "./work.js";
import "./code.js";

const SMALL = 96; // pixels of a small picture
const LARGE = 480;
const LABEL = 12; // pixels of a token's name beside the large picture
const MARGIN = 78; // pixels of these names, as in the style sheet
const ATTENTION = scale({ title: "attention", root: true });

export function view(app) {
  const from = source({ text: "When Mary and John went to the store, John gave a drink to", max: 0, onchange: app.changed });
  const layer = layers(false);
  const run = h("button", { class: "main" }, "Show the heads");
  const trouble = h("div");
  const status = h("p", { class: "wait", role: "status" });
  const shown = h("div", {}, empty("Enter a text. Each small picture is a head: its rows are tokens, and a stronger square is more attention to the column’s token."));
  const code = document.createElement("request-code");
  const reading = work({ trouble, starts: run, status });
  let recorded = null; // a stored run `{ session, run, model }` instead of a text
  let drawn = null; // `{ layer, ids, texts, first, heads, at(head, row): shares }`
  let head = 0;
  const pins = pinning(app.changed);

  const form = h(
    "form",
    { noValidate: true, onsubmit: (event) => (event.preventDefault(), begin()) },
    from.element,
    h("div", { class: "row" }, field("Layer", layer.element), run, reading.stop),
  );
  const element = h("section", { "aria-label": "Attention" }, form, trouble, status, shown, code);
  from.element.addEventListener("input", () => ((recorded = null), pins.write()));
  layer.element.addEventListener("change", () => {
    app.changed();
    if (drawn || reading.isRunning()) begin();
  });
  onTheme(() => drawn && draw());

  const begin = () =>
    reading.run(async (signal) => {
      const model = app.model();
      const asked = recorded ?? from.asked(model);
      if (!recorded) {
        const { layers: count } = await app.structure(model);
        signal.throwIfAborted();
        if (layer.element.options.length !== count) layer.set(count);
      }
      status.textContent = "Reading the heads…";
      const [which, point] = [layer.element.value, `layers.${layer.element.value}.attention.weights`];
      const found = await (recorded ? fromStored(asked, point, signal) : fromText(model, asked, point, signal));
      drawn = { layer: which, ...found };
      head = Math.min(head, drawn.heads - 1);
      draw();
      app.changed();
    }, begin);

  /** The pattern of all tokens, or of as many of the last ones as the server allows in an answer. */
  async function fromText(model, asked, point, signal) {
    const text = await answered(model, asked, code, signal);
    const total = text.ids.length;
    for (let first = 0; ; first = Math.ceil((first + total) / 2)) {
      const body = rowsBody(model, text.ids, [point], span(first, total));
      try {
        const [{ data }] = Object.values((await post("v1/completions", body, signal)).activations_meta.runs[0].points);
        code.note("The patterns", { method: "POST", path: "v1/completions", body });
        return { ...text, first, heads: data[0].length, at: (which, row) => data[row][which] };
      } catch (error) {
        if (error.code === "no_attention_patterns") error.hint = "Start the server with attention=eager, or load the model so by POST /models/load.";
        if (!isTooLarge(error) || first >= total - 1) throw error;
      }
    }
  }

  async function fromStored({ session, run: id, model }, point, signal) {
    const where = { session_id: session, run_id: id };
    const found = await stored(where, [point], signal);
    const ids = [...found.token_id.values];
    const { texts } = await textsOf(model, ids, signal);
    const { shape, values } = found[point];
    const [, heads, widest] = shape;
    const lengths = found[`${point}.lengths`].values;
    const start = (which, row) => (row * heads + which) * widest;
    code.note("The stored pattern", storedQuery(where));
    return { model, ids, texts, first: found.position.values[0], heads, at: (which, row) => values.subarray(start(which, row), start(which, row) + lengths[row]) };
  }

  function draw() {
    const count = drawn.ids.length - drawn.first;
    const strip = document.createElement("token-strip");
    strip.setAttribute("aria-label", "Tokens; the one you point at shows where it attends");
    strip.set(drawn.texts.map((one) => ({ text: one })));
    const size = Math.min(LARGE, Math.max(shown.clientWidth - MARGIN, 2 * SMALL));
    const large = picture(head, count, size);
    const mark = h("div", { class: "mark" }); // the row of the selected token
    const said = h("p", { class: "from", role: "status" });
    const title = h("h2", {}, `Layer ${drawn.layer}, head ${head}`);
    const smalls = span(0, drawn.heads).map((which) => h("button", { type: "button", "aria-pressed": String(which === head), onclick: () => pick(which) }, picture(which, count, SMALL), `head ${which}`));
    let looked = -1;
    function pick(which) {
      head = which;
      smalls.forEach((one, i) => one.setAttribute("aria-pressed", String(i === which)));
      picture(which, count, size, large);
      title.textContent = `Layer ${drawn.layer}, head ${which}`;
      look(strip.pinned >= 0 ? strip.pinned : drawn.ids.length - 1);
      app.changed();
    }
    function look(at) {
      const row = (looked = at - drawn.first);
      mark.hidden = row < 0;
      if (row < 0) return said.replaceChildren(`Token ${at} is before those that fit into a response.`);
      Object.assign(mark.style, { top: `${(100 * row) / count}%`, height: `${100 / count}%` });
      const shares = drawn.at(head, row);
      strip.colour((_, i) => (i < shares.length ? ATTENTION.colour(shares[i]) : null));
      const most = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 3);
      return said.replaceChildren(`${quoted(drawn.texts[at])} (${at}) attends to ${most.map((i) => `${quoted(drawn.texts[i])} (${i}) ${percent(shares[i])}`).join(", ")}`);
    }
    onLook(strip, (index) => index >= 0 && look(index));
    pins.watch([strip]);
    large.addEventListener("pointermove", (event) => {
      const row = Math.max(0, Math.min(Math.floor((event.offsetY / large.clientHeight) * count), count - 1));
      if (strip.pinned < 0 && row !== looked) look(row + drawn.first);
    });
    const cut = drawn.first ? h("p", { class: "from" }, `The patterns of the last ${count} tokens: those of all ${drawn.ids.length} do not fit into a response.`) : null;
    const step = Math.ceil((LABEL * drawn.ids.length) / size);
    const sides = [["down", drawn.first], ["across", 0]].map(([side, first]) => h("div", { class: side, "aria-hidden": "true" }, ...labels(first, step)));
    const told = `Down: the query token. Across: the tokens that it attends to.${step > 1 ? ` One token in ${step} is named.` : ""}`;
    const figure = h("figure", {}, h("div", { class: "large" }, sides[0], h("div", { class: "heat" }, large, mark), sides[1]), h("figcaption", {}, told));
    shown.replaceChildren(
      ...[cut, h("div", { class: "heads" }, ...smalls), title, legend(ATTENTION), said, h("div", { class: "beside" }, figure, strip)].filter(Boolean),
    );
    look(drawn.ids.length - 1);
    pins.restore();
  }

  /** The names of each `step`-th token from `first` on, at its place beside the large picture. */
  function labels(first, step) {
    const count = drawn.ids.length - first;
    return span(0, Math.ceil(count / step)).map((i) => {
      const label = h("span", {}, named(drawn.texts[first + i * step]));
      label.style.setProperty("--at", `${(100 * (i * step + 0.5)) / count}%`);
      return label;
    });
  }

  /** A head as a picture of at most two squares a pixel: a row for each query token, a column for each key token. */
  function picture(which, count, size, canvas = h("canvas", { role: "img" })) {
    const total = drawn.ids.length;
    const [width, height] = [Math.min(total, 2 * size), Math.min(count, 2 * size)];
    Object.assign(canvas, { width, height });
    canvas.setAttribute("aria-label", `Head ${which}: rows are tokens, columns where they attend`);
    Object.assign(canvas.style, { width: `${size}px`, aspectRatio: `${total} / ${count}` });
    const largest = new Float32Array(width * height); // of the shares within a square
    for (let row = 0; row < count; row++) {
      const shares = drawn.at(which, row);
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
      const whole = recorded ?? (ids ? { ids, count } : {});
      return { ...rest, ...whole, layer: layer.element.value, head, ...pins.read() };
    },
    write: (state) => {
      reading.end();
      trouble.replaceChildren();
      from.write(state);
      recorded = state.run ? { session: asText(state.session), run: asText(state.run), model: asText(state.model) } : null;
      head = Math.max(0, Math.trunc(asNumber(state.head, 0)));
      pins.write(state);
      if (state.layer !== undefined && Number.isInteger(Number(state.layer))) layer.element.replaceChildren(h("option", { value: String(Number(state.layer)) }, `layer ${Number(state.layer)}`));
      drawn = null;
      shown.replaceChildren(empty("Press “Show the heads”."));
    },
    begin,
  };
}
