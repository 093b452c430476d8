// Colours of a text's tokens: by their own numbers, by a captured point, or by a readout.

import { choose, field, fill, h, newId, number, perFrame, quoted } from "./dom.js";
import { fillTensors } from "./forms.js";
import { readouts, rows, rowsBody, scores, scoresBody, span, storedQuery, storedRows, vector } from "./recompute.js";
import { BEYOND, COLUMN, columns, legend, PROBABILITY, reach, scale, scoreScale, unitOf, valueOf } from "./scales.js";
import { asNumber, asText } from "./state.js";
import { dot, norm } from "./tensors.js";
import { entropy } from "./tokens.js";
import { work } from "./work.js";

const OWN = {
  probability: [(token) => Math.exp(token.logprob), PROBABILITY],
  entropy: [entropy, scale({ title: "entropy, at least", unit: "bits", high: 5 })],
};
const NAMES = [["none", "nothing"], ["probability"], ["entropy"], ["norm", "norm of a point"], ["projection", "projection on a vector"], ["readout", "probe or feature"]];

/**
 * Chooses how strips are coloured. `apply(strip, text)` colours one; `text` has the `model`, all token ids `ids`, and the
 * strip's tokens among them: from `offset` on, or at `positions`. A stored run also has `run` and `isWhole`. `readouts`
 * are those in the answer, `comes` is the one that its request asked for, and `more` is as in `rowsBody`.
 * `scores(strip, index, text)` returns the numbers for the details. Its requests are stored in `code`. The legend shows
 * the current colours.
 */
export function colouring(app, { code, stored = false, onchange }) {
  const by = choose(NAMES.map(([value, text]) => [value, text ?? value]));
  if (!stored) by.value = "probability";
  const points = h("datalist", { id: newId("points") });
  const point = stored ? choose([]) : h("input", { list: points.id, value: "layers.*.output", spellcheck: false });
  const direction = choose([["", "none is stored"]]);
  const readout = choose([["", "none is installed"]]); // `name/column` of a linear one, `name` of an autoencoder
  const feature = h("input", { type: "number", min: 0, value: 0 });
  const pointField = field("Point", point, stored ? "of the run" : "such as layers.12.output");
  const directionField = field("Vector", direction, "a tensor file that was sent to /v1/tensors");
  const readoutField = field("Probe or autoencoder", readout, "of this model; the view Probes lists all");
  const featureField = field("Feature", feature);
  const key = h("div");
  const trouble = h("div", { role: "status" });
  const status = h("span", { class: "wait", role: "status" });
  const reading = work({ trouble, status, what: "coloring", home: () => by }); // requests for the chosen colours
  const forgotten = new WeakSet(); // strips that are no longer shown
  const held = new Map(); // strip -> `{ found, state, name, ends }`: its numbers, the choices and the readout that they are of, and the painted scale's ends
  const element = h("div", { class: "row colouring", role: "group", "aria-label": "Colors" }, field("Color by", by), pointField, directionField, readoutField, featureField, h("div", {}, key, status, " ", reading.stop, trouble), points);
  let installed = [];

  const needs = () => ({ point: ["norm", "projection"].includes(by.value), direction: by.value === "projection", readout: by.value === "readout" });
  const chosen = () => {
    const [name, column] = readout.value.split("/");
    const unknown = { name, kind: column === undefined ? "sae" : "linear", activation: "none", values: 1 }; // until the list is read
    return { name, column: Number(column ?? feature.value), linear: column !== undefined, spec: installed.find((one) => one.name === name) ?? unknown };
  };
  function arrange() {
    pointField.hidden = !needs().point;
    directionField.hidden = !needs().direction;
    readoutField.hidden = !needs().readout;
    featureField.hidden = !needs().readout || !readout.value || chosen().linear;
  }
  function tell(of) {
    key.replaceChildren(of ? legend(of) : "");
  }
  function begin() {
    arrange();
    if (!stored && by.value in OWN) tell(OWN[by.value][1]); // tokens of a stored run may lack them
    else if (!held.size) tell(null);
  }
  async function know(model) {
    const isOld = () => !stored && model !== app.model(); // another one was chosen meanwhile
    if (needs().direction) await fillTensors(direction);
    if (needs().readout) {
      const found = await readouts(model);
      if (isOld()) return;
      installed = found;
      const options = installed.flatMap((one) => (one.kind === "sae" ? [[one.name, `${one.name}, an autoencoder`]] : columns(one).map(([at, name]) => [`${one.name}/${at}`, name])));
      fill(readout, options.length ? options : [["", "none is installed"]]);
      readoutField.querySelector("small").textContent = chosen().spec.point ? `at ${chosen().spec.point}` : "the view Probes says how to install one";
      arrange();
    }
    if (!stored && needs().point) {
      const { points: all, layers } = await app.structure(model);
      if (isOld()) return;
      points.replaceChildren(...all.filter(({ shape }) => shape.length === 1 && shape[0] > 1).map(({ name }) => h("option", { value: name })));
      if (point.value === "layers.*.output") point.value = `layers.${Math.floor(layers / 2)}.output`;
    }
  }

  /** A number for each token, unless the tokens have them; remarks are added to `notes`. */
  async function numbersOf(strip, text, signal, notes) {
    if (by.value in OWN) {
      if (stored && !strip.tokens.some(({ logprob }) => logprob !== undefined)) throw new Error("Probabilities are not stored with runs: press “Score the tokens now”.");
      return [];
    }
    const note = (request) => code.note(`The color of ${quoted(strip.getAttribute("aria-label"))}`, request);
    const computes = () => stored && notes.push("Computed now, with interventions left out.");
    const what = { chosen: needs().readout ? chosen() : null, point: point.value.trim(), direction: needs().direction ? direction.value : null };
    return valuesOf(text, strip.tokens.length, what, { note, computes, signal });
  }

  function apply(strip, text) {
    begin();
    return reading.join(async (signal) => {
      await know(stored ? text.model : app.model());
      const asked = JSON.stringify(read());
      if (!strip.tokens.length) return;
      if (by.value === "none" || (needs().direction && !direction.value) || (needs().readout && !readout.value)) {
        held.delete(strip);
        tell(null);
        strip.colour(null);
        return;
      }
      if (!(by.value in OWN)) status.textContent = "Reading the values…";
      const notes = [];
      const found = await numbersOf(strip, text, signal, notes);
      if (asked !== JSON.stringify(read()) || forgotten.has(strip)) return; // another colour, or another answer
      if (notes.length) trouble.replaceChildren(...notes);
      held.set(strip, { found, state: asked });
      paintAll();
    }, onchange);
  }

  /** Colours all strips by one scale, which the legend shows, in the next frame; skips those that already have it. */
  const paintAll = perFrame(() => {
    const state = JSON.stringify(read());
    const same = [...held].filter(([, one]) => one.state === state);
    if (!same.length) return;
    for (const [strip, one] of held) {
      if (one.state === state) continue;
      held.delete(strip);
      strip.colour(null); // until its values have arrived, too
    }
    const sound = same.flatMap(([, one]) => one.found).filter(Number.isFinite);
    const [ownOf, own] = OWN[by.value] ?? [];
    const of = own ?? (sound.length ? scaleOf(sound) : null);
    tell(of);
    const ends = of && `${of.at(0)} ${of.at(1)}`;
    for (const [strip, its] of same) {
      if (its.ends === ends) continue;
      its.ends = ends;
      strip.colour(of && ((token, i) => of.colour(own ? ownOf(token) : its.found[i])));
    }
  });

  function scaleOf(sound) {
    const { most, clipped } = reach(sound);
    if (needs().readout) return scoreScale(chosen().spec, chosen().column, most, clipped);
    const unit = clipped ? BEYOND : "";
    if (by.value === "norm") return scale({ title: "norm", unit, low: sound.reduce((a, b) => Math.min(a, b), Infinity), high: most });
    return scale({ title: "projection", unit, low: -most, high: most, signed: true });
  }

  by.addEventListener("change", begin);
  for (const one of [by, point, direction, readout, feature]) one.addEventListener("change", () => (reading.end(), onchange()));
  begin();

  const asked = () => (needs().readout && chosen().linear ? [chosen().name] : []);
  const read = () => ({ by: by.value, point: point.value, vector: direction.value, readout: readout.value, feature: feature.valueAsNumber || 0 });
  return {
    element,
    apply,
    /** Reads the choices for a model. */
    prepare: async (model = app.model()) => {
      try {
        if (model) await know(model);
      } catch (error) {
        if (error.status !== 401) trouble.replaceChildren(h("p", { class: "error" }, error.message));
      }
    },
    /** Offers the points of a stored run, and those that its model can compute now. */
    setPoints: (held, lacking) => fill(point, [...held.map((name) => [name]), ...lacking.map((name) => [name, `${name}, not recorded`])]),
    /** Forgets a strip that is no longer shown. */
    forget: (strip) => {
      held.delete(strip);
      forgotten.add(strip);
      begin();
    },
    /** Whether the chosen colour needs a new run of a stored run's tokens. */
    costs: ({ points }) => (needs().readout ? !(chosen().linear && COLUMN + chosen().name in points) : needs().point && !(point.value in points)),
    /** The request fields for values of a linear readout in the answer. */
    asked,
    scores: (strip, index, text) => {
      const came = Object.entries(text?.readouts ?? {}).flatMap(([name, { labels, rows: its }]) => {
        const spec = installed.find((one) => one.name === name) ?? { name, labels, values: its[index]?.length ?? 0 };
        return columns(spec).map(([at, title]) => [title, `${number(its[index]?.[at] ?? NaN, 4)} ${spec.activation ? unitOf(spec) : ""}`]);
      });
      const { found = [], state } = held.get(strip) ?? {};
      if (!found.length || state !== JSON.stringify(read())) return came;
      const { title } = scaleOf(found);
      return came.some(([name]) => name === title) ? came : [...came, [title, `${number(found[index], 4)} ${needs().readout ? unitOf(chosen().spec) : ""}`]];
    },
    /** Colours strips while their answers arrive, `[strip, text]` of each; returns whether that needs no request of its own. */
    follow: (pairs) => {
      const isOwn = by.value in OWN;
      const { name, column, spec } = chosen();
      if (!isOwn && !(asked().length && pairs.every(([, { comes }]) => comes === name))) return false;
      for (const [strip, text] of pairs) {
        const rows = (!isOwn && text.readouts?.[name]?.rows) || [];
        held.set(strip, { found: rows.map((row) => valueOf(spec, row, column)), state: JSON.stringify(read()), name });
      }
      paintAll();
      return true;
    },
    /** Adds a piece's readout values to the text, and colours their tokens. */
    arrived: (strip, text, came) => {
      for (const [name, { labels, generated }] of Object.entries(came)) {
        const one = ((text.readouts ??= {})[name] ??= { labels, rows: [] });
        if (!generated) continue;
        const { first, index, values } = generated;
        const its = held.get(strip);
        values.forEach((row, i) => {
          const at = index?.[i] ?? first + i;
          one.rows[at] = row;
          if (its?.name === name) its.found[at] = valueOf(chosen().spec, row, chosen().column);
        });
        strip.repaint(first, (index?.at(-1) ?? first + values.length - 1) + 1);
        paintAll();
      }
    },
    read,
    write: (state) => {
      const { by: name, point: at, vector: along, readout: one, feature: which } = state ?? {};
      if (NAMES.some(([value]) => value === name)) by.value = name;
      if (!stored || [...point.options].some(({ value }) => value === at)) point.value = asText(at, point.value);
      if (along) fill(direction, [[asText(along)]]);
      if (one) fill(readout, [[asText(one)]]);
      feature.value = Math.max(0, Math.trunc(asNumber(which, 0)));
      begin();
    },
  };
}

/**
 * A number for each of `count` tokens of a text: of the `chosen` readout, or of a `point`: its norm or, with a `direction`,
 * its projection. `note(request)` is called with each request, and `computes()` when the model runs the text again.
 */
async function valuesOf(text, count, { chosen, point, direction }, { note, computes, signal }) {
  const { model, ids, run, more } = text;
  const wanted = text.positions ?? span(text.offset, text.offset + count);
  /** Rows at `wanted`, as stored in the run; otherwise the model runs the text again. */
  const taken = async (column, body, compute) => {
    if (run?.points?.[column]) {
      note(storedQuery(run));
      const found = await storedRows(run, column, signal);
      return wanted.map((at) => found.rows[found.positions.indexOf(at)]);
    }
    if (text.isWhole === false) throw new Error("Not all tokens of the run are stored: it cannot be computed now.");
    note({ method: "POST", path: "v1/completions", body });
    computes();
    return compute();
  };
  if (chosen) {
    const { name, column, linear, spec } = chosen;
    if (spec.model && spec.model !== model) throw new Error(`${name} is a probe of ${spec.model}, and the response is of ${model}.`);
    const some = text.readouts?.[name]?.rows ?? (await taken(linear && COLUMN + name, scoresBody(model, ids, spec, wanted, more), () => scores(model, ids, spec, wanted, signal, more)));
    return span(0, count).map((i) => valueOf(spec, some[i], column));
  }
  const some = await taken(point, rowsBody(model, ids, [point], wanted, more), async () => {
    const found = Object.values(await rows(model, ids, [point], wanted, signal, more));
    if (found.length > 1) throw new Error(`${point} names ${found.length} points: name one of them.`);
    return found[0];
  });
  if (!direction) return some.map((row) => (row ? norm(row) : NaN));
  const along = await vector(direction, signal);
  const length = norm(along);
  return some.map((row) => {
    if (row && row.length !== along.length) throw new Error(`The vector has ${along.length} numbers, the point ${row.length}.`);
    return row ? dot(row, along) / length : NaN;
  });
}
