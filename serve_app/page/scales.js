// Colour scales that differ in lightness, so that they work with colour blindness, and their legends; names and colours of
// readout values.

import { h, number, visible } from "./dom.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

// One hue from the page's background to a strong tone; two hues that differ in blue and yellow for signed values.
const RAMPS = {
  light: { one: [[255, 255, 255], [189, 215, 238], [74, 136, 190], [11, 59, 110]], two: [[120, 60, 0], [232, 152, 58], [255, 255, 255], [104, 160, 214], [11, 59, 110]] },
  dark: { one: [[22, 26, 33], [28, 66, 110], [62, 128, 196], [166, 210, 255]], two: [[255, 196, 120], [184, 100, 20], [22, 26, 33], [44, 104, 172], [166, 210, 255]] },
};

function mixed(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const left = Math.min(Math.floor(place), stops.length - 2);
  return stops[left].map((from, i) => Math.round(from + (stops[left + 1][i] - from) * (place - left)));
}

const linear = (part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);

const css = (rgb) => `rgb(${rgb.join(" ")})`;
const inkOn = (rgb) => (luminance(rgb) > 0.18 ? "#000" : "#fff"); // whichever is more readable

/** The background and the text colour at a place of a ramp, of which the browser takes the theme's. */
function inks(kind, share) {
  const [light, other] = [RAMPS.light, RAMPS.dark].map((ramps) => mixed(ramps[kind], share));
  return { ground: `light-dark(${css(light)}, ${css(other)})`, ink: `light-dark(${inkOn(light)}, ${inkOn(other)})` };
}

/**
 * A scale from numbers to colours: the larger a number, the stronger its colour.
 * @param {Object} of `low`, `high`: the ends; `title`, `unit`: for the legend; `signed`: two hues around 0; `root`: small values show, too.
 */
export function scale({ low = 0, high = 1, title, unit = "", signed = false, root = false }) {
  const kind = signed ? "two" : "one";
  const share = (value) => {
    const part = high === low ? 0.5 : (value - low) / (high - low);
    return root ? Math.sqrt(part) : part;
  };
  const colour = (value) => (Number.isFinite(value) ? inks(kind, share(value)) : null);
  const at = (part) => low + (high - low) * (root ? part ** 2 : part);
  return { title, unit, colour, at, rgb: (value) => mixed(RAMPS[dark.matches ? "dark" : "light"][kind], share(value)) };
}

export const PROBABILITY = scale({ title: "probability" });

/** Colours for a rank, from 1 on, in steps. */
export function rankScale(title) {
  const steps = [[1, "1"], [2, "2"], [3, "3"], [10, "4 to 10"], [100, "11 to 100"], [1000, "101 to 1000"], [Infinity, "above 1000"]];
  const shares = [1, 0.84, 0.68, 0.52, 0.35, 0.18, 0];
  const colour = (rank) => (rank > 0 ? inks("one", shares[steps.findIndex(([end]) => rank <= end)]) : null);
  return { title, unit: "", colour, steps };
}

/** Colours an element by a scale. */
export function paint(element, colours) {
  element.style.backgroundColor = colours?.ground ?? "";
  element.style.color = colours?.ink ?? "";
}

/** A scale's legend: its title and unit, and its ends or steps. */
export function legend({ title, unit, steps, colour, at }) {
  const parts = steps ?? Array.from({ length: 7 }, (_, i) => [at(i / 6), i % 3 ? " " : number(at(i / 6))]);
  const swatches = parts.map(([value, text]) => {
    const made = h("span", { class: "swatch" }, text);
    paint(made, colour(value));
    return made;
  });
  return h("div", { class: "legend" }, `${title}${unit ? ` (${unit})` : ""}: `, h("span", { class: "swatches" }, ...swatches));
}

/** Calls back when the system changes between dark and light: for what is not coloured by `paint`. */
export const onTheme = (act) => dark.addEventListener("change", act);

export const COLUMN = "readouts."; // prefix of a stored run's readout columns

export const BEYOND = "a few lie beyond the ends";
const UNITS = { sigmoid: "probability", none: "score" };
export const unitOf = ({ activation }) => UNITS[activation] ?? "activation";

/** The values of a linear readout as `[column, name]`. */
export function columns({ name, labels, values }) {
  if (labels) return labels.map((label, i) => [i, `${name}: ${visible(label)}`]);
  return values === 1 ? [[0, name]] : Array.from({ length: values }, (_, i) => [i, `${name}: value ${i}`]);
}

/** The name of one value: a label, or a feature's number. */
export const titleOf = (readout, column) => (readout.kind === "sae" ? `feature ${column} of ${readout.name}` : columns(readout)[column]?.[1] ?? readout.name);

/** One value of a row, in the format of `scores` in `recompute.js`; a missing feature is 0. */
export function valueOf(readout, row, column) {
  if (!row) return NaN;
  if (readout.kind === "sae") return row.find(({ feature }) => feature === column)?.value ?? 0;
  return row[column] ?? NaN;
}

/** A scale for values of a readout of at most `most` in size; `clipped` if some are larger. */
export function scoreScale(readout, column, most, clipped = false) {
  const what = { title: titleOf(readout, column), unit: unitOf(readout) + (clipped ? `; ${BEYOND}` : "") };
  if (readout.activation === "sigmoid") return scale({ ...what, unit: unitOf(readout) });
  if (readout.activation === "none") return scale({ ...what, low: -most, high: most, signed: true });
  return scale({ ...what, high: most || 1 });
}

/** The largest distance of values from 0, without a few far larger ones, such as often a text's first token, which would hide the others. */
export function reach(values) {
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const largest = sizes.at(-1) ?? 0;
  const usual = 1.5 * (sizes[Math.floor(0.95 * (sizes.length - 1))] ?? 0);
  const clipped = usual > 0 && largest > 3 * usual;
  return { most: clipped ? usual : largest, clipped };
}
