// What the tokens of a text are coloured by: numbers of their own, or of a captured point.

import { isAbort } from "./api.js";
import { choose, field, fill, h, newId, number } from "./dom.js";
import { rows, span, storedRows, vector, vectors } from "./recompute.js";
import { legend, onTheme, scale } from "./scales.js";
import { asText } from "./state.js";
import { dot, norm } from "./tensors.js";
import { entropy } from "./tokens.js";

const OWN = {
  probability: [(token) => Math.exp(token.logprob), () => scale({ title: "probability", reversed: true })],
  entropy: [entropy, () => scale({ title: "entropy, at least", unit: "bits", high: 5 })],
};

/**
 * Chooses how strips are coloured. `apply(strip, text)` colours one; `text` is `{ ids, offset, run?, more? }`: all token
 * ids, and which of them is the strip's first. `scores(strip, index)` are the numbers for the details.
 */
export function colouring(app, { stored = false, onchange = () => {} } = {}) {
  const names = [["none", "nothing"], ...(stored ? [] : [["probability"], ["entropy"]]), ["norm", "norm of a point"], ["projection", "projection on a vector"]];
  const by = choose(names.map(([value, text]) => [value, text ?? value]));
  if (!stored) by.value = "probability";
  const points = h("datalist", { id: newId("points") });
  const point = stored ? choose([]) : h("input", { list: points.id, value: "layers.*.output", spellcheck: false });
  const direction = choose([["", "none is stored"]]);
  const pointField = field("Point", point, stored ? "what the run recorded" : "such as layers.12.output");
  const directionField = field("Vector", direction, "a tensor file that was sent to /v1/tensors");
  const key = h("div");
  const trouble = h("div", { role: "status" });
  const values = new WeakMap(); // by strip
  const element = h("div", { class: "row colouring" }, field("Colour by", by), pointField, directionField, h("div", {}, key, trouble), points);

  const needs = () => ({ point: ["norm", "projection"].includes(by.value), direction: by.value === "projection" });
  function arrange() {
    pointField.hidden = !needs().point;
    directionField.hidden = !needs().direction;
    key.replaceChildren(by.value in OWN ? legend(OWN[by.value][1]()) : "");
  }
  async function know() {
    if (needs().direction) {
      const found = await vectors();
      fill(direction, found.length ? found.map(([id, name, shape]) => [id, `${name} [${shape.join(", ")}] ${id}`]) : [["", "none is stored"]]);
    }
    if (!stored && needs().point && !points.childElementCount) {
      const { points: all, layers } = await app.structure();
      points.replaceChildren(...all.filter(({ shape }) => shape.length === 1 && shape[0] > 1).map(({ name }) => h("option", { value: name })));
      if (point.value === "layers.*.output") point.value = `layers.${Math.floor(layers / 2)}.output`;
    }
  }

  async function numbersOf(strip, text, signal) {
    if (by.value in OWN) return strip.tokens.map(OWN[by.value][0]);
    const found = text.run ? await storedRows(text.run, point.value, signal) : null;
    const wanted = span(text.offset, text.offset + strip.tokens.length);
    const some = found ? wanted.map((at) => found.rows[found.positions.indexOf(at)]) : Object.values(await rows(app.model(), text.ids, [point.value], wanted, signal, text.more))[0];
    if (by.value === "norm") return some.map((row) => (row ? norm(row) : NaN));
    const along = await vector(direction.value, signal);
    const length = norm(along);
    return some.map((row) => {
      if (row && row.length !== along.length) throw new Error(`The vector has ${along.length} numbers, the point ${row.length}.`);
      return row ? dot(row, along) / length : NaN;
    });
  }

  async function apply(strip, text, signal) {
    trouble.replaceChildren();
    arrange();
    try {
      await know();
      if (by.value === "none" || !strip.tokens.length || (needs().direction && !direction.value)) {
        values.delete(strip);
        key.replaceChildren();
        return strip.colour(null);
      }
      if (needs().point) trouble.replaceChildren("Reading the point…");
      const found = await numbersOf(strip, text, signal);
      trouble.replaceChildren();
      const of = scaleOf(by.value, found);
      values.set(strip, [of.title, of.unit, found]);
      key.replaceChildren(legend(of));
      strip.colour((_, i) => of.colour(found[i]));
    } catch (error) {
      if (!isAbort(error)) trouble.replaceChildren(h("p", { class: "error" }, error.message));
    }
    return null;
  }

  by.addEventListener("change", onchange);
  point.addEventListener("change", onchange);
  direction.addEventListener("change", onchange);
  onTheme(onchange);
  arrange();
  return {
    element,
    apply,
    setPoints: (found) => fill(point, found.map((name) => [name])),
    scores: (strip, index) => {
      const [title, unit, found] = values.get(strip) ?? [];
      return title && !(by.value in OWN) ? [[title, `${number(found[index], 4)} ${unit}`]] : [];
    },
    /** A colour for a token that has just come, where that takes no request. */
    atOnce: () => {
      const own = OWN[by.value];
      const of = own?.[1]();
      return own ? (token) => of.colour(own[0](token)) : null;
    },
    read: () => ({ by: by.value, point: point.value, vector: direction.value }),
    write: (state = {}) => {
      if (names.some(([value]) => value === state.by)) by.value = state.by;
      if (!stored) point.value = asText(state.point, point.value);
      if (state.vector) fill(direction, [[asText(state.vector)]]);
      arrange();
    },
  };
}

function scaleOf(kind, found) {
  const sound = found.filter(Number.isFinite);
  const low = Math.min(...sound);
  const high = Math.max(...sound);
  if (kind in OWN) return OWN[kind][1]();
  if (kind === "norm") return scale({ title: "norm", low, high });
  const most = Math.max(Math.abs(low), Math.abs(high));
  return scale({ title: "projection", low: -most, high: most, signed: true });
}
