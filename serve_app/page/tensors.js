// safetensors files, read in the browser.

/** Values of a dtype as numbers, by safetensors' name of it. */
export const READS = {
  F32: (data) => new Float32Array(data),
  F64: (data) => Float32Array.from(new Float64Array(data)),
  F16: (data) => Float32Array.from(new Uint16Array(data), half),
  BF16: (data) => new Float32Array(Uint32Array.from(new Uint16Array(data), (bits) => bits << 16).buffer),
  I64: (data) => Float64Array.from(new BigInt64Array(data), Number),
  I32: (data) => new Int32Array(data),
};

/** The tensors of a file by name: `{ shape, values }` as float32 numbers; 64-bit integers as numbers. */
export async function tensors(blob) {
  const head = new DataView(await blob.slice(0, 8).arrayBuffer());
  const length = Number(head.getBigUint64(0, true));
  const told = JSON.parse(await blob.slice(8, 8 + length).text());
  const found = {};
  for (const [name, { dtype, shape, data_offsets: span }] of Object.entries(told)) {
    if (!(dtype in READS)) continue;
    const [from, to] = span;
    const data = await blob.slice(8 + length + from, 8 + length + to).arrayBuffer();
    found[name] = { shape, values: READS[dtype](data) };
  }
  return found;
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/** The rows of a tensor `[rows, ...]`, each as one flat list. */
export function rowsOf({ shape, values }) {
  const width = shape.slice(1).reduce((product, one) => product * one, 1);
  return Array.from({ length: shape[0] }, (_, i) => values.slice(i * width, (i + 1) * width));
}

export const norm = (row) => Math.sqrt(row.reduce((sum, value) => sum + value * value, 0));
export const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
