// Stored runs: of an Arrow file, the bytes of the columns that are wanted. docs/data.md describes the files.

import { ApiError } from "./api.js";
import { READS } from "./tensors.js";

const [SCHEMA, BATCH] = [1, 3]; // types of messages
const [INT, FLOAT, FIXED_SIZE_LIST, LARGE_LIST] = [2, 3, 16, 21]; // types of columns
const DTYPES = { float32: "F32", float64: "F64", float16: "F16", bfloat16: "BF16", int64: "I64", int32: "I32" };
const AHEAD = 1 << 16; // bytes that are read at once, since a message's length is only in itself

/** A table of a flatbuffer. */
class Table {
  constructor(view, at) {
    [this.view, this.at, this.slots] = [view, at, at - view.getInt32(at, true)];
  }

  /** Where a field lies; 0 if it is left out. */
  field(number) {
    const slot = 4 + 2 * number;
    const offset = slot < this.view.getUint16(this.slots, true) ? this.view.getUint16(this.slots + slot, true) : 0;
    return offset && this.at + offset;
  }

  /** Where what a field points to lies. */
  target = (number) => this.field(number) && this.field(number) + this.view.getUint32(this.field(number), true);
  table = (number) => new Table(this.view, this.target(number));
  byte = (number) => (this.field(number) ? this.view.getUint8(this.field(number)) : 0);
  long = (number) => (this.field(number) ? Number(this.view.getBigInt64(this.field(number), true)) : 0);

  text(number) {
    const at = this.target(number);
    return at ? new TextDecoder().decode(new Uint8Array(this.view.buffer, this.view.byteOffset + at + 4, this.view.getUint32(at, true))) : "";
  }

  /** The places of a vector's items, `width` bytes each. */
  items(number, width) {
    const at = this.target(number);
    return Array.from({ length: at && this.view.getUint32(at, true) }, (_, i) => at + 4 + i * width);
  }

  tables = (number) => this.items(number, 4).map((at) => new Table(this.view, at + this.view.getUint32(at, true)));
  texts = (number) => Object.fromEntries(this.tables(number).map((pair) => [pair.text(0), pair.text(1)]));
}

/** Reads bytes of a file with what comes after them; `fetched(first, end)` gives fewer where the file ends. */
function reader(fetched) {
  let [from, held] = [0, new ArrayBuffer(0)];
  return async (first, end) => {
    if (first < from || end > from + held.byteLength) [from, held] = [first, await fetched(first, Math.max(end, first + AHEAD))];
    if (end > from + held.byteLength) throw new ApiError("The file is shorter than the server says.");
    return held.slice(first - from, end - from);
  };
}

/** The message at a byte: its type, its table, and where its body begins and ends. */
async function message(read, at) {
  const [mark, size] = new Int32Array(await read(at, at + 8));
  if (mark !== -1 || size <= 0) throw new ApiError("The file is not one of activations.");
  const view = new DataView(await read(at + 8, at + 8 + size));
  const own = new Table(view, view.getUint32(0, true));
  const body = at + 8 + size;
  return { type: own.byte(1), table: own.table(2), body, end: body + own.long(3) };
}

/** The columns of a file by name: the number of their first buffer, and for points their dtype, shape and heads. */
function columnsOf(schema) {
  const { dtypes, heads } = JSON.parse(schema.texts(2).vitrine);
  const found = {};
  let buffer = 0;
  for (const field of schema.tables(1)) {
    const [name, type] = [field.text(0), field.target(4) ? INT : field.byte(2)]; // a dictionary's values are numbers
    const shape = JSON.parse(field.texts(6)["ARROW:extension:metadata"] || "{}").shape ?? [];
    found[name] = { type, buffer, kind: DTYPES[dtypes[name] ?? "int32"], shape, heads: heads?.[name] };
    buffer += { [INT]: 2, [FLOAT]: 2, [FIXED_SIZE_LIST]: 3, [LARGE_LIST]: 4 }[type] ?? 3; // the last is of texts
  }
  return found;
}

const product = (shape) => shape.reduce((all, one) => all * one, 1);

function joined(parts) {
  const all = new Float32Array(parts.reduce((sum, one) => sum + one.length, 0));
  let at = 0;
  for (const one of parts) {
    all.set(one, at);
    at += one.length;
  }
  return all;
}

/**
 * Columns of a run that a server lists: `{ shape, values }` by name, with `position` and `token_id`. An attention pattern
 * is padded to `[tokens, heads, widest]`; `<name>.lengths` says how many tokens each row's token sees.
 */
export async function columns({ offset, bytes: size }, names, fetched) {
  const read = reader(fetched);
  let at = 8;
  let all = {};
  for (;;) {
    const { type, table, end } = await message(read, at);
    if (type === BATCH) break;
    if (type === SCHEMA) all = columnsOf(table);
    at = end;
  }
  const parts = Object.fromEntries(["position", "token_id", ...names].map((name) => [name, []]));
  for (at = Math.max(at, offset); at < offset + size; ) {
    const { table, body, end } = await message(read, at);
    const rows = table.long(0);
    const places = table.items(2, 16).map((place) => [0, 8].map((more) => Number(table.view.getBigInt64(place + more, true))));
    const of = (number) => read(body + places[number][0], body + places[number][0] + places[number][1]);
    for (const name of rows ? Object.keys(parts) : []) {
      if (!all[name]) throw new ApiError(`The run has no ${name}.`);
      const { type, buffer, kind, shape } = all[name];
      if (type === LARGE_LIST) parts[name].push([Array.from(new BigInt64Array((await of(buffer + 1)).slice(0, 8 * rows + 8)), Number), READS[kind](await of(buffer + 3))]);
      else parts[name].push(READS[kind](await of(buffer + (type === FIXED_SIZE_LIST ? 2 : 1))).subarray(0, rows * product(shape)));
    }
    at = end;
  }
  const found = {};
  for (const [name, some] of Object.entries(parts)) {
    const { type, shape, heads } = all[name];
    if (type === LARGE_LIST) Object.assign(found, pattern(name, some, heads));
    else {
      const values = joined(some);
      found[name] = { shape: [values.length / product(shape), ...shape], values };
    }
  }
  return found;
}

function pattern(name, parts, heads) {
  const rows = parts.flatMap(([ends, values]) => ends.slice(1).map((end, i) => values.subarray(ends[i], end)));
  const lengths = rows.map((row) => row.length / heads);
  const widest = Math.max(0, ...lengths);
  const values = new Float32Array(rows.length * heads * widest);
  for (const [i, row] of rows.entries()) {
    for (let head = 0; head < heads; head++) values.set(row.subarray(head * lengths[i], (head + 1) * lengths[i]), (i * heads + head) * widest);
  }
  return { [name]: { shape: [rows.length, heads, widest], values }, [`${name}.lengths`]: { shape: [rows.length], values: lengths } };
}
