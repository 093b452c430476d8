// What a readout's values are called, and how they are coloured.

import { scale } from "./scales.js";

export const COLUMN = "readouts."; // with which a stored run's columns of readouts begin

const UNITS = { sigmoid: "probability", none: "score" };
export const unitOf = ({ activation }) => UNITS[activation] ?? "activation";

/** The values of a linear readout as `[column, name]`. */
export function columns({ name, labels, values }) {
  if (labels) return labels.map((label, i) => [i, `${name}: ${label}`]);
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

/** A scale for values of a readout, the largest of which is `most` away from 0. */
export function scoreScale(readout, column, most) {
  const what = { title: titleOf(readout, column), unit: unitOf(readout) };
  if (readout.activation === "sigmoid") return scale(what);
  if (readout.activation === "none") return scale({ ...what, low: -most, high: most, signed: true });
  return scale({ ...what, high: most || 1 });
}

export const mostOf = (values) => values.reduce((most, value) => (Number.isFinite(value) ? Math.max(most, Math.abs(value)) : most), 0);
