// Steering: the same answer with and without a direction added, side by side.

import { post } from "./api.js";
import { colouring } from "./colouring.js";
import { button, choose, empty, errorNote, field, fill, h, number, percent } from "./dom.js";
import { fillTensors, layers, source } from "./forms.js";
import { again, complete, continuing, directionOf, readouts, rows, tokenized, vector } from "./recompute.js";
import { columns } from "./scales.js";
import { asNumber, asText } from "./state.js";
import { norm } from "./tensors.js";
import { answerPane, asPlain, details, onLook, parting, pinning, SAME, tokenPane } from "./tokens.js";
import { work } from "./work.js";
import "./code.js";

const KINDS = [["prompts", "difference of two prompts"], ["probe", "a probe"], ["tensor", "a tensor on the server"], ["feature", "a feature of an autoencoder"]];
const NONE = [["", "none is installed"]];
const HOW = "the view Probes says how to install one";
const CHANGES = [["add", "add it"], ["cap", "cap the length along it"], ["rotate", "rotate toward it"]];
const TOKENS = [["all", "all tokens but the first"], ["generated", "the completion’s tokens"], ["prompt", "the prompt’s tokens but the first"], ["prompt_last", "the prompt’s last token"]];

export function view(app) {
  const from = source({ text: "I went to the park and", label: "Prompt", max: 60, onchange: () => (pins.write(), app.changed()) });
  const kind = choose(KINDS);
  const toward = h("textarea", { rows: 2, placeholder: "I love this, it is wonderful" });
  const away = h("textarea", { rows: 2, placeholder: "I hate this, it is terrible" });
  const tensor = choose([["", "none is stored"]]);
  const upload = h("input", { type: "file", accept: ".safetensors" });
  const probe = choose(NONE); // `name/column` of a linear readout
  const sae = choose(NONE);
  const feature = h("input", { type: "number", min: 0, value: 0 });
  const value = h("input", { type: "number", step: "any", value: 10 });
  const layer = layers(true);
  const tokens = choose(TOKENS);
  const change = choose(CHANGES);
  const most = h("input", { type: "number", step: "any", value: 0 });
  const angle = h("input", { type: "number", step: "any", min: -180, max: 180, value: 20 });
  const strength = h("input", { type: "range", min: -2, max: 2, step: 0.05, value: 0.5 });
  const shown = h("output", {}, "0.50");
  const run = h("button", { class: "main" }, "Generate with and without");
  const trouble = h("div");
  const answering = work({ trouble, starts: run });
  const unsent = h("div"); // errors of a file
  const sending = work({ trouble: unsent, what: "sending", home: () => upload });
  const told = empty("Enter a prompt and a direction: two short texts that differ in what you want to add, or what is on the server. Both completions use the same seed.");
  const result = h("div", {}, told);
  const about = tokenPane();
  const code = document.createElement("request-code");
  const colours = colouring(app, { code, onchange: () => (recolour(), app.changed()) });
  const pins = pinning(app.changed);
  let report = null;
  let answers = []; // `{ strip, text }` of the default and the steered one
  let installed = []; // readouts of the model

  const byPrompts = h("div", { class: "fields" }, field("Toward", toward), field("Away from", away));
  const byProbe = h("div", { class: "fields" }, field("Probe", probe, "at its own point"));
  const byTensor = h("div", { class: "fields" }, field("Tensor", tensor), field("Send a safetensors file", upload, "it is stored on the server"), sending.stop, unsent);
  const byFeature = h("div", { class: "fields" }, field("Autoencoder", sae, "at its own point"), field("Feature", feature), field("Added to its value", value, "the view Probes shows how large it gets"));
  const where = field("Where", layer.element);
  const howMuch = field("Strength", h("span", { class: "slider" }, strength, shown), "in lengths of the residual stream; below 0 away from it");
  const operation = field("Change", change);
  const limit = field("At most", most, "the length of an activation vector along the direction");
  const turn = field("Degrees", angle, "in the plane of both texts’ activations; the vectors’ lengths stay");
  const form = h(
    "form",
    { noValidate: true, onsubmit: (event) => (event.preventDefault(), begin()) },
    from.element,
    h("fieldset", {}, h("legend", {}, "Direction"), field("From", kind), byPrompts, byProbe, byTensor, byFeature),
    h("div", { class: "fields" }, where, field("Which tokens", tokens), operation, howMuch, limit, turn),
    h("div", { class: "row" }, run, answering.stop),
  );
  const element = h("div", { class: "split" }, h("section", { "aria-label": "Steer" }, form, colours.element, trouble, result, code), about.element);

  strength.setAttribute("aria-label", "Strength");
  strength.addEventListener("input", () => (shown.textContent = strength.valueAsNumber.toFixed(2)));
  kind.addEventListener("change", arrange);
  for (const one of [probe, sae, change]) one.addEventListener("change", arrange);
  upload.addEventListener("click", () => (upload.value = "")); // so that the same file can be chosen again
  upload.addEventListener("change", send);
  element.addEventListener("input", app.changed);
  element.addEventListener("change", app.changed);
  arrange();

  function arrange() {
    for (const [name, fields] of [["prompts", byPrompts], ["probe", byProbe], ["tensor", byTensor], ["feature", byFeature]]) fields.hidden = kind.value !== name;
    const isFeature = kind.value === "feature";
    const rotates = change.querySelector("[value=rotate]");
    rotates.disabled = kind.value !== "prompts"; // which alone give two directions
    if (rotates.disabled && rotates.selected) change.value = "add";
    operation.hidden = isFeature;
    for (const [name, fields] of [["add", howMuch], ["cap", limit], ["rotate", turn]]) fields.hidden = isFeature || change.value !== name;
    where.hidden = ["probe", "feature"].includes(kind.value);
    shown.textContent = strength.valueAsNumber.toFixed(2);
    if (kind.value !== "prompts") know().catch((error) => trouble.replaceChildren(errorNote(error)));
  }

  async function know() {
    if (kind.value === "tensor") return fillTensors(tensor);
    const model = app.model();
    const found = model ? await readouts(model) : [];
    if (model !== app.model()) return null; // another one was chosen meanwhile
    installed = found;
    const probes = installed.filter((one) => one.kind === "linear").flatMap((one) => columns(one).map(([at, title]) => [`${one.name}/${at}`, title]));
    const saes = installed.filter((one) => one.kind === "sae").map((one) => [one.name]);
    fill(probe, probes.length ? probes : NONE);
    fill(sae, saes.length ? saes : NONE);
    const [linear, chosen] = [named(probe.value.split("/")[0]), named(sae.value)];
    byProbe.querySelector("small").textContent = linear ? `at ${linear.point}` : HOW;
    byFeature.querySelector("small").textContent = chosen ? `at ${chosen.point}, ${chosen.values} features` : HOW;
  }

  const named = (name) => installed.find((one) => one.name === name);

  function send() {
    const [file] = upload.files;
    if (!file) return null;
    return sending.run(async (signal) => {
      const kept = await post("v1/tensors", await file.arrayBuffer(), signal);
      await fillTensors(tensor);
      signal.throwIfAborted();
      const id = [...tensor.options].find(({ value }) => value.startsWith(kept.id));
      if (id) tensor.value = id.value;
    }, send);
  }

  /** The interventions for some tokens: one for each layer, with the vector of that layer. */
  async function direction(model, which, signal) {
    if (kind.value === "feature") {
      if (!sae.value) throw new Error(`No autoencoder of this model is installed: ${HOW}.`);
      return [{ op: "add", sae: sae.value, feature: feature.valueAsNumber || 0, value: value.valueAsNumber || 0, tokens: which }];
    }
    const how = {
      add: { op: "add", unit: "residual_norm", scale: strength.valueAsNumber, tokens: which },
      cap: { op: "clamp_projection", max: most.valueAsNumber || 0, tokens: which },
      rotate: { op: "rotate", angle: angle.valueAsNumber || 0, tokens: which },
    }[change.value];
    if (kind.value === "probe") {
      const [name, column] = probe.value.split("/");
      if (!named(name)) await know(); // the list may be late
      if (!named(name)) throw new Error(`No probe of this model is chosen: ${HOW}.`);
      return [{ ...how, point: named(name).point, vector: await directionOf(named(name), Number(column), signal) }];
    }
    const all = layer.element.value === "all";
    const points = all ? ["layers.*.output"] : [`layers.${layer.element.value}.output`];
    if (kind.value === "tensor") {
      if (!tensor.value) throw new Error("No tensor is chosen: send a safetensors file, or take the difference of two prompts.");
      await vector(tensor.value, signal); // report early if it is missing
      return points.map((point) => ({ ...how, point, vector: tensor.value }));
    }
    const sides = await Promise.all([toward, away].map((box) => lastRows(model, box.value || box.placeholder, points, signal)));
    return Object.entries(sides[0]).map(([point, [row]]) => {
      const difference = row.map((value, i) => value - sides[1][point][0][i]);
      if (norm(difference) === 0) throw new Error("Both texts give the same activations: let them differ.");
      return { ...how, point, ...(how.op === "rotate" ? { vector: sides[1][point][0], toward: row } : { vector: difference }) };
    });
  }

  async function lastRows(model, text, points, signal) {
    const { ids } = await tokenized(model, { text, chat: false }, signal);
    return rows(model, ids, points, [ids.length - 1], signal);
  }

  /** Forgets the shown answers. */
  function drop() {
    for (const { strip } of answers) colours.forget(strip);
    answers = [];
  }

  async function begin() {
    let panes = [];
    const isWhole = await answering.run(async (signal) => {
      const model = app.model();
      const asked = from.asked(model);
      drop();
      panes = ["Default", "Steered"].map((name) => answerPane(name));
      report = h("p", { class: "from", role: "status" }, "Making the direction…");
      result.replaceChildren(h("div", { class: "pair" }, ...panes.map(([made]) => made)), report);
      const mine = (answers = panes.map(([, strip]) => ({ strip, text: { model, ids: [], offset: 0 } })));
      for (const one of mine) onLook(one.strip, (index) => look(one, index));
      pins.watch(mine.map(({ strip }) => strip));
      const { ids } = await tokenized(model, asked, signal);
      // The first token's row is often a hundred times as long as the others, and attention rests on it.
      const which = { all: { from: 1 }, prompt: { from: Math.min(1, ids.length - 1), to: ids.length } }[tokens.value] ?? tokens.value;
      const interventions = await direction(model, which, signal);
      report.textContent = "";
      const live = colours.asked().length ? { readouts: colours.asked() } : {};
      const bodies = [live, { ...live, interventions, report: true }].map((more) => continuing(model, ids, asked, more));
      for (const { text } of mine) Object.assign(text, { ids: [...ids], offset: ids.length, comes: colours.asked()[0] });
      mine[1].text.more = again(interventions, ids.length);
      follow();
      code.note("Default", { method: "POST", path: "v1/completions", body: bodies[0] });
      code.note("Steered", { method: "POST", path: "v1/completions", body: bodies[1] });
      const ends = await Promise.all(bodies.map((body, i) => complete(body, (some, choice) => take(mine[i], some, choice), signal)));
      tell(ends[1], interventions[0].scale);
      const said = parting(...mine.map(({ strip }) => strip));
      report.append(" ", said === SAME ? `${SAME} Try a larger change, all layers or all tokens${asked.chat ? "" : ", or tick “as a chat message”, which a chat model expects"}.` : said);
    }, begin);
    if (isWhole === null || !panes.length) return; // others have replaced them, or none were requested
    if (!isWhole) report.textContent = "";
    for (const [made, strip] of panes) made.append(asPlain(strip) ?? "");
    pins.restore();
    recolour();
  }

  function take({ strip, text }, tokens, { text: said, readouts: came }) {
    text.ids.push(...tokens.map(({ id }) => id));
    strip.add(tokens, said);
    if (came) colours.arrived(strip, text, came);
  }

  const follow = () => colours.follow(answers.map(({ strip, text }) => [strip, text]));

  async function recolour() {
    colours.prepare();
    if (answering.isRunning() && follow()) return;
    await Promise.all(answers.map(({ strip, text }) => colours.apply(strip, text)));
    for (const one of answers) if (one.strip.pinned >= 0) look(one, one.strip.pinned);
  }

  function look({ strip, text }, index) {
    about.show(...details(strip.tokens[index], text.offset + index, colours.scores(strip, index, text)));
  }

  /** The size of the changes: the operations' unit and effects, as reported by the server. */
  function tell({ norms = [], report: done = [] }, scale) {
    const lengths = norms.map(({ point, norm: length }) => `${number(Math.abs(scale) * length)} at ${point}, where activation vectors are ${number(length)} long`);
    const changes = done.map(({ point, rows: count, mean_change: mean, largest_change: most }) => (count ? `${count} activation vectors at ${point} by ${percent(mean ?? Infinity)} of their length on average, by ${percent(most ?? Infinity)} at the most` : `no activation vector at ${point}`));
    report.textContent = lengths.length ? `Added a vector of length ${some(lengths)} (median). ` : "";
    if (changes.length) report.append(`Changed ${some(changes)}.`);
    if (app.info()?.tokens_depend_on_batch) report.append(" In this dtype, a request’s tokens may depend on the batch composition.");
  }

  const some = (all, most = 4) => all.slice(0, most).join("; ") + (all.length > most ? `, and at ${all.length - most} more points` : "");

  return {
    element,
    ready: async () => {
      await Promise.all([layer.know(app, trouble), colours.prepare()]);
      arrange();
    },
    read: () => ({
      ...from.read(),
      ...pins.read(),
      colour: colours.read(),
      kind: kind.value,
      toward: toward.value,
      away: away.value,
      tensor: tensor.value,
      probe: probe.value,
      sae: sae.value,
      feature: feature.valueAsNumber || 0,
      value: value.valueAsNumber || 0,
      layer: layer.element.value,
      tokens: tokens.value,
      change: change.value,
      strength: strength.valueAsNumber,
      most: most.valueAsNumber || 0,
      angle: angle.valueAsNumber || 0,
    }),
    write: (state) => {
      // Another view sends only a feature: the typed text and its answers remain.
      if ("text" in state || state.ids) {
        from.write(state);
        answering.end();
        sending.end();
        drop();
        trouble.replaceChildren();
        result.replaceChildren(told);
        about.show();
      }
      pins.write(state);
      if (state.colour) colours.write(state.colour);
      if (KINDS.some(([name]) => name === state.kind)) kind.value = state.kind;
      toward.value = asText(state.toward, toward.value);
      away.value = asText(state.away, away.value);
      if (state.tensor) fill(tensor, [[asText(state.tensor)]]);
      if (state.probe) fill(probe, [[asText(state.probe)]]);
      if (state.sae) fill(sae, [[asText(state.sae)]]);
      feature.value = Math.max(0, Math.trunc(asNumber(state.feature, 0)));
      value.value = asNumber(state.value, 10);
      if (/^(all|\d{1,4})$/.test(state.layer)) layer.element.replaceChildren(h("option", { value: state.layer }, state.layer));
      if (TOKENS.some(([value]) => value === state.tokens)) tokens.value = state.tokens;
      if (CHANGES.some(([value]) => value === state.change)) change.value = state.change;
      strength.value = asNumber(state.strength, strength.valueAsNumber);
      most.value = asNumber(state.most, 0);
      angle.value = asNumber(state.angle, 20);
      arrange();
    },
  };
}
