// Readouts: the installed ones, and the tokens of a session with the largest values of one.

import { address, get } from "./api.js";
import { button, choose, empty, errorNote, field, fill, h, keepingFocus, newId, number, table, visible } from "./dom.js";
import { readouts, scores, scoresBody, span, storedSessions, storedTokens, tokenized } from "./recompute.js";
import { columns, legend, paint, scoreScale, titleOf, valueOf } from "./scales.js";
import { asNumber, asText } from "./state.js";
import { work } from "./work.js";
import "./code.js";

const KEPT = 30; // tokens to show
const AROUND = 10; // tokens of the text on each side
const MOST_RUNS = 1000; // listed by the server at a time
const NONE = "none is stored";
const KINDS = { linear: "linear", sae: "sparse autoencoder" };

export function view(app) {
  const held = h("div");
  const trouble = h("div");
  const opened = h("div", { hidden: true });
  const facts = h("div");
  const feature = h("input", { type: "number", min: 0, value: 0 });
  const value = choose([]);
  const sessions = h("datalist", { id: newId("sessions") });
  const session = h("input", { list: sessions.id, spellcheck: false, required: true });
  const most = h("input", { type: "number", min: 1, max: MOST_RUNS, value: 10 });
  const run = h("button", { class: "main" }, "Find the strongest tokens");
  const finding = work({ trouble, starts: run });
  const steer = button("", () => {
    const what = readout().kind === "sae" ? { kind: "feature", sae: name, feature: column() } : { kind: "probe", probe: `${name}/${column()}` };
    app.open("steer", { ...what, model: readout().model });
  });
  const status = h("p", { class: "wait", role: "status" });
  const result = h("div");
  const code = document.createElement("request-code");
  const featureField = field("Feature", feature);
  const valueField = field("Value", value);
  const form = h(
    "form",
    { noValidate: true, onsubmit: (event) => (event.preventDefault(), find()) },
    h("div", { class: "fields" }, featureField, valueField, field("Session", session, "of stored runs"), field("First runs to read", most, "each goes through the model once more, without interventions")),
    h("div", { class: "row" }, run, finding.stop, steer),
    sessions,
  );
  opened.append(facts, form, status, result);
  const element = h("section", { "aria-label": "Probes" }, held, trouble, opened, code);
  form.addEventListener("input", app.changed);

  let installed = [];
  let name = "";
  let best = []; // distinct tokens, each at its largest value: `{ id, score, at, texts, facts, count }`
  let sought = null; // their readout: `[readout, column]`

  const home = () => held.querySelector("button, .scroll");
  const readout = () => installed.find((one) => one.name === name);
  const column = () => (readout()?.kind === "sae" ? feature.valueAsNumber || 0 : Number(value.value));

  async function list() {
    trouble.replaceChildren();
    try {
      installed = await readouts();
    } catch (error) {
      if (error.status !== 401) trouble.replaceChildren(errorNote(error, list, home));
      return;
    }
    code.note("Probes", { method: "GET", path: "v1/readouts", query: { limit: 1000 } });
    const row = (one) => [button(one.name, () => open(one.name), { class: "link", "aria-pressed": String(one.name === name) }), KINDS[one.kind], one.model, one.point, String(one.values), visible((one.labels ?? []).join(", ")), one.description ? h("span", { class: "words" }, visible(one.description)) : ""];
    const heads = ["Name", "Kind", "Model", "Point", "Values", "Labels", "Description"];
    held.replaceChildren(installed.length ? table("Installed probes and autoencoders", heads, installed.map(row)) : howTo());
    opened.hidden = !readout();
    if (readout()) await show();
    else if (name) trouble.replaceChildren(errorNote(new Error(`No probe is named ${name}.`)));
  }

  async function open(wanted) {
    if (wanted !== name) clear();
    name = wanted;
    app.changed();
    await keepingFocus(list, () => facts.querySelector("h2"));
    facts.querySelector("h2")?.scrollIntoView({ block: "nearest" });
  }

  function clear() {
    finding.end();
    best = [];
    result.replaceChildren();
    status.textContent = "";
  }

  /** The description of the chosen readout, and its actions. */
  async function show() {
    const one = readout();
    const isSae = one.kind === "sae";
    const told = [
      ["Kind", `${KINDS[one.kind]}, ${one.activation === "none" ? "no activation" : one.activation}`],
      ["Model", one.model],
      ["Point", one.point],
      [isSae ? "Features" : "Values", String(one.values)],
      ["Installed", new Date(one.created * 1000).toLocaleString()],
      ...(one.description ? [["Description", visible(one.description)]] : []),
    ];
    facts.replaceChildren(h("h2", {}, one.name), h("dl", { class: "facts" }, ...told.flatMap(([term, said]) => [h("dt", {}, term), h("dd", {}, said)])));
    feature.max = one.values - 1;
    featureField.hidden = !isSae;
    steer.textContent = isSae ? "Steer with the feature" : "Steer with the probe";
    valueField.hidden = isSae || one.values === 1;
    if (!isSae) fill(value, columns(one));
    try {
      const found = await storedSessions({ model: one.model });
      if (one.name !== name) return; // another one was chosen meanwhile
      sessions.replaceChildren(...found.map(({ id }) => h("option", { value: id })));
      session.placeholder = found[0]?.id ?? NONE;
    } catch (error) {
      if (one.name === name && error.status !== 401) trouble.replaceChildren(errorNote(error));
    }
  }

  function howTo() {
    const to = `--url ${address("").href.replace(/\/$/, "")}`;
    const lines = [`python -m deployments.readouts add PROBE.safetensors ${to}`, `python -m deployments.readouts add SAE_DIRECTORY --name NAME --model MODEL ${to}`];
    return h(
      "div",
      {},
      empty("No probe is installed. A linear probe, as evals.probes writes it, or a sparse autoencoder in SAELens’ format is installed by"),
      h("pre", { tabIndex: 0, role: "region", "aria-label": "How to install a probe" }, lines.join("\n")),
      button("Look again", () => keepingFocus(list, home)),
    );
  }

  async function find() {
    clear();
    if (session.placeholder !== NONE) session.value ||= session.placeholder;
    if (!session.value) {
      const what = session.placeholder === NONE ? `No run of ${readout().model} is stored.` : "Name a session.";
      status.textContent = `${what} A chat stores its activations where “Store activations with the response” is checked.`;
      return;
    }
    app.changed();
    const ended = await finding.run(read, find);
    if (ended === false) status.textContent = best.length ? `Stopped. ${status.textContent}` : "";
  }

  /** Reads one run after another, and shows the largest values so far. */
  async function read(signal) {
    const [one, at] = (sought = [readout(), column()]);
    if (at >= one.values) throw new Error(`${one.name} has the features 0 to ${one.values - 1}.`);
    const query = { session: session.value, model: one.model, limit: Math.min(Math.max(most.valueAsNumber || 1, 1), MOST_RUNS) };
    const { data, has_more: more } = await get("v1/activations/runs", query, signal);
    code.note("Runs", { method: "GET", path: "v1/activations/runs", query });
    let [tokens, runs, skipped] = [0, 0, 0];
    const every = new Map(); // token id -> as in `best`
    for (const [i, of] of data.entries()) {
      status.textContent = `Reading run ${i + 1} of ${data.length}; ${tokens} tokens so far.`;
      const { ids, isWhole } = await storedTokens(of, signal);
      if (!isWhole) {
        skipped += 1;
        continue;
      }
      const positions = span(0, ids.length);
      code.note("The values of a run", { method: "POST", path: "v1/completions", body: scoresBody(one.model, ids, one, positions) });
      const [found, { texts }] = await Promise.all([scores(one.model, ids, one, positions, signal), tokenized(one.model, { ids }, signal)]);
      for (const [j, row] of found.entries()) {
        const score = valueOf(one, row, at);
        if (one.kind === "sae" ? !(score > 0) : !Number.isFinite(score)) continue;
        const held = every.get(ids[j]) ?? { id: ids[j], score: -Infinity, count: 0 };
        every.set(ids[j], held);
        held.count += 1;
        if (score > held.score) Object.assign(held, { score, at: j, texts, facts: of });
      }
      best = [...every.values()].sort((a, b) => b.score - a.score).slice(0, KEPT);
      [tokens, runs] = [tokens + ids.length, runs + 1];
      draw();
    }
    const rest = more ? "; there are more runs" : "";
    const without = skipped ? `; ${skipped} more are left out, because not all of their tokens are stored` : "";
    const none = best.length || !tokens ? "" : " None of them has it above 0.";
    status.textContent = data.length ? `Read ${tokens} tokens of the first ${runs} runs${rest}${without}.${none}` : `The session ${session.value} has no run of ${one.model}.`;
  }

  function draw() {
    const [one, at] = sought;
    const of = scoreScale(one, at, Math.max(...best.map(({ score }) => Math.abs(score))));
    const text = (found) => {
      const piece = (from, to) => found.texts.slice(Math.max(from, 0), to).map(visible).join("");
      const token = h("mark", {}, visible(found.texts[found.at]));
      paint(token, of.colour(found.score));
      return h("span", { class: "text" }, piece(found.at - AROUND, found.at).trimStart(), token, piece(found.at + 1, found.at + 1 + AROUND));
    };
    const row = (found) => [number(found.score, 4), text(found), String(found.count), String(found.at), button(found.facts.run_id, () => app.open("runs", { session: found.facts.session_id, run: found.facts.run_id }), { class: "link" })];
    result.replaceChildren(...(best.length ? [legend(of), table(`The strongest tokens of ${titleOf(one, at)}`, ["Largest value", "Token in its text", one.kind === "sae" ? "Times above 0" : "Times", "Position", "Run"], best.map(row))] : []));
  }

  return {
    element,
    ready: list,
    leave: () => finding.stop.click(), // it would continue from run to run while invisible
    read: () => ({ readout: name, feature: feature.valueAsNumber || 0, value: Number(value.value) || 0, session: session.value, runs: most.valueAsNumber || 10 }),
    write: (state) => {
      clear();
      name = asText(state.readout);
      feature.value = Math.max(0, Math.trunc(asNumber(state.feature, 0)));
      const wanted = String(Math.max(0, Math.trunc(asNumber(state.value, 0))));
      fill(value, [[wanted]]);
      session.value = asText(state.session);
      most.value = Math.min(Math.max(1, Math.trunc(asNumber(state.runs, 10))), MOST_RUNS);
    },
  };
}
