// safetensors files, read in the browser.

const WIDTHS = { F64: 8, F32: 4, F16: 2, BF16: 2, I64: 8, I32: 4, U8: 1, BOOL: 1 };

/** The tensors of a file, by name: `{ shape, values }`, as float32 numbers; integers of 64 bits as numbers. */
export async function tensors(blob) {
  const head = new DataView(await blob.slice(0, 8).arrayBuffer());
  const length = Number(head.getBigUint64(0, true));
  const told = JSON.parse(await blob.slice(8, 8 + length).text());
  const found = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(told)) {
    if (name === "__metadata__" || !(dtype in WIDTHS)) continue;
    const data = await blob.slice(8 + length + from, 8 + length + to).arrayBuffer();
    found[name] = { shape, values: numbers(dtype, data) };
  }
  return { tensors: found, metadata: told.__metadata__ ?? {} };
}

function numbers(dtype, data) {
  if (dtype === "F32") return new Float32Array(data);
  if (dtype === "F64") return Float32Array.from(new Float64Array(data));
  if (dtype === "I64") return Array.from(new BigInt64Array(data), Number);
  if (dtype === "I32") return new Int32Array(data);
  if (dtype === "BF16") {
    const wide = new Uint32Array(data.byteLength / 2);
    new Uint16Array(data).forEach((bits, i) => (wide[i] = bits << 16));
    return new Float32Array(wide.buffer);
  }
  if (dtype === "F16") return Float32Array.from(new Uint16Array(data), half);
  return new Uint8Array(data);
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
