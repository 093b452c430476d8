// What a readout's values are called, and how they are coloured.

import { visible } from "./dom.js";
import { scale } from "./scales.js";

export const COLUMN = "readouts."; // with which a stored run's columns of readouts begin

const UNITS = { sigmoid: "probability", none: "score" };
export const unitOf = ({ activation }) => UNITS[activation] ?? "activation";

/** The values of a linear readout as `[column, name]`. */
export function columns({ name, labels, values }) {
  if (labels) return labels.map((label, i) => [i, `${name}: ${visible(label)}`]);
  return values === 1 ? [[0, name]] : Array.from({ length: values }, (_, i) => [i, `${name}: value ${i}`]);
}

/** What one value is called: a label's, or a feature's number. */
export const titleOf = (readout, column) => (readout.kind === "sae" ? `feature ${column} of ${readout.name}` : columns(readout)[column]?.[1] ?? readout.name);

/** One value of a row, as `scores` in `recompute.js` gives rows; a feature that is not there is 0. */
export function valueOf(readout, row, column) {
  if (!row) return NaN;
  if (readout.kind === "sae") return row.find(({ feature }) => feature === column)?.value ?? 0;
  return row[column] ?? NaN;
}

/** A scale for values of a readout, the largest of which is `most` away from 0; `clipped` where some lie beyond. */
export function scoreScale(readout, column, most, clipped = false) {
  const what = { title: titleOf(readout, column), unit: unitOf(readout) + (clipped ? "; a few lie beyond the ends" : "") };
  if (readout.activation === "sigmoid") return scale({ ...what, unit: unitOf(readout) });
  if (readout.activation === "none") return scale({ ...what, low: -most, high: most, signed: true });
  return scale({ ...what, high: most || 1 });
}

/** A scale for these values. A few that are far larger, as a text's first token often is, do not hide the others. */
export function fitted(readout, column, values) {
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const largest = sizes.at(-1) ?? 0;
  const usual = 1.5 * (sizes[Math.floor(0.95 * (sizes.length - 1))] ?? 0);
  const clipped = usual > 0 && largest > 3 * usual;
  return scoreScale(readout, column, clipped ? usual : largest, clipped);
}

export const mostOf = (values) => values.reduce((most, value) => (Number.isFinite(value) ? Math.max(most, Math.abs(value)) : most), 0);
