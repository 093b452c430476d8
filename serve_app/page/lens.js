// Lens: what each layer would put behind each token, and what becomes of the answer where one is patched into another.

import { ApiError, isAbort, post } from "./api.js";
import { button, choose, empty, errorNote, field, h, named, percent, quoted } from "./dom.js";
import { source } from "./forms.js";
import { complete, continuing, isTooLarge, lens, lensBody, tokenized } from "./recompute.js";
import { legend, onTheme, rankScale, scale, SURE } from "./scales.js";
import { asText } from "./state.js";
import { answerPane, details, onLook, pinning, ranking } from "./tokens.js";
import "./code.js";
import "./grid.js";

const TOP = 5; // tokens of each cell
const WINDOW = 64; // tokens that one request reads, halved where the server allows fewer
const LONG = 20; // tokens of a cell that was chosen
const PATCHED = 40; // new tokens behind a patch, at most
const LAST = "the last layer’s token";
const BY = {
  probability: ["probability of the top token", () => scale({ title: "probability of the top token" }), ({ logprob }) => Math.exp(logprob)],
  last: [`probability of ${LAST}`, () => scale({ title: `probability of ${LAST}` }), ({ last }) => Math.exp(last.logprob)],
  rank: [`rank of ${LAST}`, () => rankScale(`rank of ${LAST}`), ({ last }) => last.rank],
};

export function view(app) {
  const from = source({ text: "The capital of France is", label: "Text", max: 24, onchange: () => ((patched = chosen = null), (isStale = true), pins.write(), app.changed()) });
  const run = h("button", { class: "main" }, "Read the layers");
  const stop = button("Stop", () => running?.abort(), { hidden: true });
  const by = choose(Object.entries(BY).map(([name, [title]]) => [name, title]));
  const key = h("div");
  const grid = document.createElement("lens-grid");
  const held = h("div", {}, empty("Give a text, or open one from a chat’s answer. Each column shows, layer by layer, which token the model would put behind that place."));
  const about = h("aside", { "aria-label": "Cell" }, empty("Choose a cell for its likeliest tokens."));
  const trouble = h("div");
  const result = h("div", { class: "patched" });
  const status = h("p", { class: "wait", role: "status" });
  const code = document.createElement("request-code");
  let running = null;
  let text = null; // { ids, texts, count }
  let isStale = false; // whether another text was typed since
  let cells = []; // by position, `{ layers }`, the lens of a token
  let reads = null; // the request under way for columns in view
  let wanted = [0, 0];
  let step = WINDOW;
  let patching = null;
  let chosen = null; // the cell whose likeliest tokens are shown, as `{ position, layer }`, or that a link names
  const pins = pinning(app.changed); // of the answers to a patch
  let patched = null; // `{ from, to }`, cells as `{ position, layer }`: the patch that is shown, or that a link names

  const form = h(
    "form",
    { noValidate: true, onsubmit: (event) => (event.preventDefault(), begin()) },
    from.element,
    h("div", { class: "row" }, run, stop, field("Colour by", by), key),
  );
  const element = h("div", { class: "split" }, h("section", { "aria-label": "Lens" }, form, trouble, held, status, result, code), about);

  const at = (position, layer) => cells[position]?.layers[layer];
  function cell(position, layer) {
    const { top: [top] = [], targets: [last] = [] } = at(position, layer) ?? {};
    if (!top) return undefined;
    const told = { probability: percent(Math.exp(top.logprob)), last: `${LAST} at ${percent(Math.exp(last.logprob))}`, rank: `${LAST} at rank ${last.rank}` };
    return { text: top.token, said: `${named(top.token)}, ${told[by.value]}`, logprob: top.logprob, last };
  }
  function colours() {
    const [, make, value] = BY[by.value];
    const of = make();
    key.replaceChildren(legend(of));
    return (one) => of.colour(value(one));
  }
  let colour = colours();
  const recolour = () => {
    colour = colours();
    if (text) grid.refresh();
    app.changed();
  };
  by.addEventListener("change", recolour);
  onTheme(recolour);

  async function begin() {
    running?.abort();
    patching?.abort();
    running = new AbortController();
    const { signal } = running;
    const asked = from.asked();
    trouble.replaceChildren();
    result.replaceChildren();
    [run.disabled, stop.hidden] = [true, false];
    try {
      status.textContent = "Writing the text as tokens…";
      text = await tokenized(app.model(), asked, signal);
      isStale = false;
      if (!asked.ids && asked.max_tokens) await goOn(asked, signal);
      await open();
      app.changed();
      if (chosen?.position < text.ids.length) grid.choose(chosen.position, chosen.layer, true);
      if ([patched?.from, patched?.to].every((cell) => cell?.position < text.ids.length)) patch(patched.from, patched.to);
    } catch (error) {
      if (!isAbort(error)) trouble.replaceChildren(errorNote(error, begin));
    } finally {
      [run.disabled, stop.hidden, status.textContent] = [false, true, ""];
    }
  }

  /** Has the model answer, and takes its tokens as part of the text. */
  async function goOn(asked, signal) {
    status.textContent = "The model answers…";
    const body = continuing(app.model(), text.ids, asked);
    code.note("The answer", { method: "POST", path: "v1/completions", body });
    const prompt = text.ids;
    await complete(
      body,
      (tokens) => {
        text.ids = [...text.ids, ...tokens.map(({ id }) => id)];
        text.texts.push(...tokens.map((one) => one.text));
      },
      signal,
    );
    text.count = prompt.length;
  }

  async function open() {
    const { layers } = await app.structure();
    cells = [];
    reads?.abort();
    reads = null;
    held.replaceChildren(grid);
    about.replaceChildren(empty("Choose a cell for its likeliest tokens. Drag one onto another token to patch it there."));
    const numbers = Array.from({ length: layers }, (_, i) => i);
    grid.show({ texts: text.texts, count: text.count, layers: numbers, cell, colours: (one) => colour(one), need: (first, end) => ((wanted = [first, end]), readNext()) });
  }

  /** Reads the first columns in view that are not there yet, one request at a time. */
  async function readNext() {
    const first = Array.from({ length: wanted[1] - wanted[0] }, (_, i) => wanted[0] + i).find((at) => !cells[at]);
    if (reads || first === undefined) return;
    reads = new AbortController();
    const mine = reads;
    const end = Math.min(first + step, text.ids.length);
    const body = lensBody(app.model(), text.ids, first, end, TOP);
    status.textContent = `Reading tokens ${first} to ${end - 1}…`;
    try {
      const found = await lens(body, mine.signal);
      if (reads !== mine) return;
      for (const one of found) cells[one.position] = one;
      code.note("The lens", { method: "POST", path: "v1/completions", body });
      grid.refresh();
    } catch (error) {
      if (isAbort(error) || reads !== mine) return;
      if (isTooLarge(error) && step > 1) step = Math.ceil(step / 2);
      else {
        trouble.replaceChildren(errorNote(error, () => (trouble.replaceChildren(), readNext())));
        wanted = [0, 0];
      }
    }
    reads = null;
    status.textContent = "";
    readNext();
  }

  grid.addEventListener("cell", ({ detail }) => look(detail));
  grid.addEventListener("patch", ({ detail }) => patchAnew(detail.from, detail.to));

  async function look({ position, layer }) {
    chosen = isStale ? null : { position, layer }; // a link holds the text that was typed since
    app.changed();
    const place = `layer ${layer}, behind token ${position}, ${quoted(text.texts[position])}`;
    const list = h("div");
    const fillIn = ({ top, targets: [last] = [] }) => {
      list.replaceChildren(ranking(`Likeliest, ${place}`, listed(top), last?.token));
      if (last) list.append(h("p", {}, `The last layer says ${quoted(last.token)}: here that has rank ${last.rank}, with ${percent(Math.exp(last.logprob))}.`));
    };
    if (at(position, layer)) fillIn(at(position, layer));
    const target = choose(text.texts.map((one, at) => [at, `${at}: ${named(one)}`]).filter(([at]) => at !== position), { id: "patch-target" });
    const apply = button("Patch it there", () => patchAnew({ position, layer }, { position: Number(target.value), layer }));
    const parts = [
      h("h2", {}, `Layer ${layer}`),
      list,
      h("h3", {}, "Patch"),
      h("p", {}, "Put this layer’s output at this token in the place of another token’s:"),
      h("div", { class: "row" }, h("label", { for: target.id }, "Token"), target, apply),
    ];
    about.replaceChildren(...parts);
    const body = lensBody(app.model(), text.ids, position, position + 1, LONG, [layer]);
    try {
      const [one] = await lens(body);
      fillIn(one.layers[0]);
      code.note("The cell", { method: "POST", path: "v1/completions", body });
    } catch (error) {
      list.append(errorNote(error));
    }
  }

  const listed = (top) => top.map(({ token, logprob }) => ({ text: token, logprob }));

  function patchAnew(source, target) {
    pins.write();
    patch(source, target);
  }

  /** Runs the text up to its answer with one row replaced, beside the same without. */
  async function patch(source, target) {
    patching?.abort();
    patching = new AbortController();
    const { signal } = patching;
    patched = isStale ? null : { from: source, to: target };
    app.changed();
    const model = app.model();
    const point = (layer) => `layers.${layer}.output`;
    const title = `Layer ${source.layer} at ${quoted(text.texts[source.position])} (${source.position}) in the place of layer ${target.layer} at ${quoted(text.texts[target.position])} (${target.position})`;
    const prompt = text.ids.slice(0, Math.max(text.count, target.position + 1));
    const strips = ["As it was", "Patched"].map((name) => answerPane(name, "h3"));
    for (const [, strip] of strips) {
      strip.colour((token) => SURE.colour(Math.exp(token.logprob)));
      onLook(strip, (index) => about.replaceChildren(...details(strip.tokens[index], prompt.length + index)));
    }
    pins.watch(strips.map(([, strip]) => strip));
    const halt = button("Stop", () => patching.abort());
    result.replaceChildren(h("h2", {}, title), legend(SURE), h("div", { class: "pair" }, ...strips.map(([made]) => made)), halt);
    result.scrollIntoView({ block: "nearest" });
    try {
      const record = {
        model,
        prompt: text.ids.slice(0, source.position + 1),
        max_tokens: 0,
        capture: { points: [point(source.layer)], tokens: { positions: [source.position] }, mode: "trace", required: true },
      };
      const stored = (await post("v1/completions", record, signal)).activations_meta;
      if (stored.status === "failed") throw new ApiError(`The row could not be stored: ${stored.reason}`);
      const row = { run_id: stored.runs[0].run_id, point: point(source.layer) };
      const change = { op: "replace", point: point(target.layer), tokens: { positions: [target.position] }, from: row };
      const settings = { ...from.read(), max_tokens: PATCHED };
      const bodies = [continuing(model, prompt, settings), continuing(model, prompt, settings, { interventions: [change] })];
      code.note("The row that is patched", { method: "POST", path: "v1/completions", body: record });
      code.note("The patched answer", { method: "POST", path: "v1/completions", body: bodies[1] });
      await Promise.all(bodies.map((body, i) => complete(body, (tokens) => strips[i][1].add(tokens), signal)));
      compare(...strips.map(([, strip]) => strip));
    } catch (error) {
      if (!isAbort(error)) result.append(errorNote(error, () => patch(source, target)));
    } finally {
      if (result.contains(halt)) pins.restore(); // else another patch, or none, is shown
      halt.remove();
    }
  }

  function compare(one, other) {
    const same = one.tokens.findIndex((token, i) => token.id !== other.tokens[i]?.id);
    const said = same < 0 && one.tokens.length === other.tokens.length ? "The answer stays the same." : `The answers part at token ${same < 0 ? one.tokens.length : same}.`;
    result.append(h("p", { role: "status" }, said));
  }

  return {
    element,
    read: () => {
      const { ids, count, ...rest } = from.read();
      const whole = text && !isStale ? { ids: text.ids, count: text.count } : ids ? { ids, count } : {};
      return { ...rest, ...whole, by: by.value, ...(chosen ? { cell: chosen } : {}), ...(patched ? { patch: patched } : {}), ...pins.read() };
    },
    write: (state) => {
      patching?.abort();
      from.write(state);
      if (Object.hasOwn(BY, asText(state.by))) by.value = state.by;
      colour = colours();
      text = null;
      chosen = isCell(state.cell) ? state.cell : null;
      pins.write(state);
      patched = [state.patch?.from, state.patch?.to].every(isCell) ? state.patch : null;
      held.replaceChildren(empty("Press “Read the layers”."));
      result.replaceChildren();
    },
    begin: async (at = 0) => {
      await begin();
      if (text) grid.scrollTo(at);
    },
  };
}

const isCell = (cell) => [cell?.position, cell?.layer].every((one) => Number.isSafeInteger(one) && one >= 0);
