// Lens: what each layer would predict after each token, and the effect of patching one token into another.

import { ApiError, post } from "./api.js";
import { button, choose, detailPane, empty, errorNote, field, fill, h, named, percent, quoted } from "./dom.js";
import { source } from "./forms.js";
import { answered, complete, continuing, isTooLarge, lens, lensBody, readouts, span } from "./recompute.js";
import { legend, PROBABILITY, rankScale, scale } from "./scales.js";
import { asText } from "./state.js";
import { answerPane, asPlain, details, onLook, parting, pinning, ranking } from "./tokens.js";
import { work } from "./work.js";
import "./code.js";
import "./grid.js";

const TOP = 5; // tokens of each cell
const WINDOW = 64; // tokens of one request, halved if the server allows fewer
const LONG = 20; // tokens of a selected cell
const PATCHED = 40; // new tokens after a patch, at most
const LAST = "the last layer’s token";
const BY = {
  probability: { scale: scale({ title: "probability of the top token" }), of: ({ logprob }) => Math.exp(logprob) },
  last: { scale: scale({ title: `probability of ${LAST}` }), of: ({ last }) => Math.exp(last.logprob) },
  rank: { scale: rankScale(`rank of ${LAST}`), of: ({ last }) => last.rank },
};

export function view(app) {
  const from = source({ text: "The capital of France is", label: "Text", max: 24, onchange: () => ((patched = chosen = null), pins.write(), app.changed()) });
  const run = h("button", { class: "main" }, "Read the layers");
  const by = choose(Object.entries(BY).map(([name, { scale: { title } }]) => [name, title]));
  const through = choose([["", "plain"]]);
  const key = h("div");
  const grid = document.createElement("lens-grid");
  const held = h("div", {}, empty("Enter a text, or open one from a chat’s response. Each column shows, layer by layer, which token the model would predict next."));
  const about = detailPane("Cell", "Choose a cell for its most likely tokens. Drag one onto another token to patch it there.");
  const trouble = h("div");
  const result = h("div", { class: "patched" });
  const status = h("p", { class: "wait", role: "status" });
  const code = document.createElement("request-code");
  const [patchTrouble, cellTrouble] = [h("div"), h("div")];
  const reading = work({ trouble, starts: run, status }); // the text
  const columns = work({ trouble, status, home: () => run }); // the visible ones; the grid would read on when it gets the focus
  const peeking = work({ trouble: cellTrouble, what: "reading the cell", home: () => about.element.querySelector("h2") }); // into the selected cell
  const patching = work({ trouble: patchTrouble, what: "the patch", home: () => result.querySelector("h2") });
  let text = null; // { model, ids, texts, count, asked }
  let cells = []; // position -> `{ layers }`, the lens of a token
  let wanted = [0, 0];
  let step = WINDOW;
  let chosen = null; // the cell whose top tokens are shown, as `{ position, layer }`, or that a link names
  const pins = pinning(app.changed); // of the answers to a patch
  let patched = null; // `{ from, to }`, cells as `{ position, layer }`: the patch that is shown, or that a link names
  const isStale = () => text.asked !== JSON.stringify(from.read()); // another text was typed since

  const form = h(
    "form",
    { noValidate: true, onsubmit: (event) => (event.preventDefault(), begin()) },
    from.element,
    h("div", { class: "row" }, run, reading.stop, columns.stop, field("Read through", through), field("Color by", by), key),
  );
  const element = h("div", { class: "split" }, h("section", { "aria-label": "Lens" }, form, trouble, held, status, result, code), about.element);

  const at = (position, layer) => cells[position]?.layers[layer];
  function cell(position, layer) {
    const { top: [top] = [], targets: [last] = [] } = at(position, layer) ?? {};
    if (!top) return undefined;
    const told = { probability: percent(Math.exp(top.logprob)), last: `${LAST} at ${percent(Math.exp(last.logprob))}`, rank: `${LAST} at rank ${last.rank}` };
    return { text: top.token, said: `${named(top.token)}, ${told[by.value]}`, logprob: top.logprob, last };
  }
  function recolour() {
    key.replaceChildren(legend(BY[by.value].scale));
    if (text) grid.refresh();
  }
  by.addEventListener("change", () => (recolour(), app.changed()));
  recolour();

  /** Offers the lenses of the model, and the chosen one, which a link may name. */
  async function offer() {
    const model = app.model();
    try {
      const installed = model ? await readouts(model, "lenses") : [];
      if (model !== app.model()) return; // another one was chosen meanwhile
      const names = new Set([...installed.map(({ name }) => name), through.value].filter(Boolean));
      fill(through, [["", "plain"], ...[...names].map((name) => [name])]);
    } catch (error) {
      if (error.status !== 401) trouble.replaceChildren(errorNote(error, offer, () => through));
    }
  }
  through.addEventListener("change", () => {
    app.changed();
    if (!text) return;
    columns.end();
    cells = [];
    grid.refresh();
    readNext();
    if (chosen) look(chosen);
  });

  async function begin() {
    columns.end();
    const done = await reading.run(async (signal) => {
      const asked = from.asked(app.model());
      const typed = JSON.stringify(from.read());
      status.textContent = "Reading the text…";
      const found = await answered(app.model(), asked, code, signal);
      const { layers } = await app.structure(found.model);
      signal.throwIfAborted();
      open({ ...found, asked: typed }, layers);
      app.changed();
      if (chosen?.position < text.ids.length) grid.choose(chosen.position, chosen.layer, true);
      if ([patched?.from, patched?.to].every((cell) => cell?.position < text.ids.length)) patch(patched.from, patched.to);
    }, begin);
    if (done === false && text) grid.refresh(); // the columns that are still shown
    return done;
  }

  /** Cancels requests for the shown text, and forgets it. */
  function clear() {
    for (const one of [columns, peeking, patching]) one.end();
    for (const one of [trouble, cellTrouble, patchTrouble, result]) one.replaceChildren();
    about.show();
    cells = [];
  }

  function open(found, layers) {
    clear();
    text = found;
    held.replaceChildren(grid);
    grid.show({ texts: text.texts, count: text.count, layers: span(0, layers), cell, colours: (one) => BY[by.value].scale.colour(BY[by.value].of(one)), need: (first, end) => ((wanted = [first, end]), readNext()) });
  }

  /** Reads the missing visible columns, a window at a time. */
  function readNext() {
    const missing = () => span(...wanted).find((at) => !cells[at]);
    if (reading.isRunning() || columns.isRunning() || missing() === undefined) return null;
    return columns.run(
      async (signal) => {
        for (let first; (first = missing()) !== undefined; ) {
          const end = Math.min(first + step, text.ids.length);
          const body = lensBody(text.model, text.ids, first, end, TOP, through.value);
          status.textContent = `Reading tokens ${first} to ${end - 1}…`;
          try {
            for (const one of await lens(body, signal)) cells[one.position] = one;
          } catch (error) {
            if (!isTooLarge(error) || step === 1) throw error;
            step = Math.ceil(step / 2);
            continue;
          }
          code.note("The lens", { method: "POST", path: "v1/completions", body });
          grid.refresh();
        }
      },
      readNext,
    );
  }

  grid.addEventListener("cell", ({ detail }) => look(detail));
  grid.addEventListener("patch", ({ detail }) => patchAnew(detail.from, detail.to));

  function look({ position, layer }) {
    chosen = isStale() ? null : { position, layer }; // a link contains the text typed since
    app.changed();
    const place = `layer ${layer}, after token ${position}, ${quoted(text.texts[position])}`;
    const list = h("div");
    const fillIn = ({ top, targets: [last] = [] }) => {
      list.replaceChildren(ranking(`Most likely, ${place}`, listed(top), last?.token));
      if (last) list.append(h("p", {}, `The last layer predicts ${quoted(last.token)}. In this layer, it has rank ${last.rank} and probability ${percent(Math.exp(last.logprob))}.`));
    };
    if (at(position, layer)) fillIn(at(position, layer));
    const target = choose(text.texts.map((one, at) => [at, `${at}: ${named(one)}`]).filter(([at]) => at !== position), { id: "patch-target" });
    const apply = button("Patch it there", () => patchAnew({ position, layer }, { position: Number(target.value), layer }));
    about.show(
      h("h2", {}, `Layer ${layer}`),
      list,
      peeking.stop,
      cellTrouble,
      h("h3", {}, "Patch"),
      h("p", {}, "Put this layer’s output at this token in the place of another token’s:"),
      h("div", { class: "row" }, h("label", { for: target.id }, "Token"), target, apply),
    );
    const body = lensBody(text.model, text.ids, position, position + 1, LONG, through.value, [layer]);
    peeking.run(async (signal) => {
      const [one] = await lens(body, signal);
      fillIn(one.layers[0]);
      code.note("The cell", { method: "POST", path: "v1/completions", body });
    });
  }

  const listed = (top) => top.map(({ token, logprob }) => ({ text: token, logprob }));

  function patchAnew(source, target) {
    pins.write();
    patch(source, target);
  }

  /** Runs the text up to its answer with one row replaced, and without. */
  async function patch(source, target) {
    patched = isStale() ? null : { from: source, to: target };
    app.changed();
    const { model } = text;
    const point = (layer) => `layers.${layer}.output`;
    const title = `Layer ${source.layer} at ${quoted(text.texts[source.position])} (${source.position}) in the place of layer ${target.layer} at ${quoted(text.texts[target.position])} (${target.position})`;
    const prompt = text.ids.slice(0, Math.max(text.count, target.position + 1));
    const panes = ["As it was", "Patched"].map((name) => answerPane(name, "h3"));
    const strips = panes.map(([, strip]) => strip);
    for (const strip of strips) {
      strip.colour((token) => PROBABILITY.colour(Math.exp(token.logprob)));
      onLook(strip, (index) => about.show(...details(strip.tokens[index], prompt.length + index)));
    }
    pins.watch(strips);
    // Below the answers, the button would move with each line. On a line of its own, it would move them when it goes.
    result.replaceChildren(h("h2", {}, title), h("div", { class: "row under" }, legend(PROBABILITY), patching.stop), patchTrouble, h("div", { class: "pair" }, ...panes.map(([made]) => made)));
    result.scrollIntoView({ block: "nearest" });
    const record = {
      model,
      prompt: text.ids.slice(0, source.position + 1),
      max_tokens: 0,
      capture: { points: [point(source.layer)], tokens: { positions: [source.position] }, mode: "trace", required: true },
    };
    const ended = await patching.run(async (signal) => {
      const settings = { ...from.sampled(), max_tokens: PATCHED };
      const stored = (await post("v1/completions", record, signal)).activations_meta;
      if (stored.status === "failed") throw new ApiError(`The activation vector could not be stored: ${stored.reason}`);
      const row = { run_id: stored.runs[0].run_id, point: point(source.layer) };
      const change = { op: "replace", point: point(target.layer), tokens: { positions: [target.position] }, from: row };
      const bodies = [continuing(model, prompt, settings), continuing(model, prompt, settings, { interventions: [change] })];
      code.note("The activation vector that is patched", { method: "POST", path: "v1/completions", body: record });
      code.note("The patched completion", { method: "POST", path: "v1/completions", body: bodies[1] });
      await Promise.all(bodies.map((body, i) => complete(body, (tokens, { text: said }) => strips[i].add(tokens, said), signal)));
      result.append(h("p", { role: "status" }, parting(...strips)));
    }, () => patch(source, target));
    if (ended === null) return; // another patch, or none, is shown
    for (const [made, strip] of panes) made.append(asPlain(strip) ?? "");
    pins.restore();
  }

  return {
    element,
    read: () => {
      const { ids, count, ...rest } = from.read();
      const whole = text && !isStale() ? { ids: text.ids, count: text.count, model: text.model } : ids ? { ids, count } : {};
      return { ...rest, ...whole, by: by.value, ...(through.value ? { lens: through.value } : {}), ...(chosen ? { cell: chosen } : {}), ...(patched ? { patch: patched } : {}), ...pins.read() };
    },
    write: (state) => {
      reading.end();
      clear();
      from.write(state);
      if (Object.hasOwn(BY, asText(state.by))) by.value = state.by;
      if (state.lens) fill(through, [["", "plain"], [asText(state.lens)]]);
      through.value = asText(state.lens);
      text = null;
      recolour();
      chosen = isCell(state.cell) ? state.cell : null;
      pins.write(state);
      patched = [state.patch?.from, state.patch?.to].every(isCell) ? state.patch : null;
      held.replaceChildren(empty("Press “Read the layers”."));
    },
    ready: offer,
    begin: async (at = 0) => {
      if (await begin()) grid.scrollTo(at);
    },
  };
}

const isCell = (cell) => [cell?.position, cell?.layer].every((one) => Number.isSafeInteger(one) && one >= 0);
