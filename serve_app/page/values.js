// Numbers for colouring tokens that the tokens do not have themselves: from storage, or computed again by the model.

import { fill } from "./dom.js";
import { rows, rowsBody, scores, scoresBody, span, storedQuery, storedRows, vector, vectors } from "./recompute.js";
import { COLUMN, valueOf } from "./scales.js";
import { dot, norm } from "./tensors.js";

export { readouts } from "./recompute.js";

/** Lists the uploaded tensors in a select. */
export async function fillTensors(select) {
  const found = await vectors();
  fill(select, found.length ? found.map(([id, name, shape]) => [id, `${name} [${shape.join(", ")}] ${id}`]) : [["", "none is stored"]]);
}

/**
 * A number for each of `count` tokens of a text, as described in `colouring.js`: of the `chosen` readout, or of a
 * `point`: its norm or, with a `direction`, its projection. `note(request)` is called with each request, and
 * `computes()` when the model runs the text again.
 */
export async function valuesOf(text, count, { chosen, point, direction }, { note, computes, signal }) {
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
    if (spec.model && spec.model !== model) throw new Error(`${name} is a readout of ${spec.model}, and the answer is ${model}’s.`);
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
