// What benchmarks/javascript_latency.py times in Node and in a page.

const BLOCK = 10; // decisions that are timed together, as a page's clock counts in tenths of a millisecond

/** The time of a decision in milliseconds: the median of blocks. */
async function median(decide, blocks) {
  await decide();
  const times = [];
  for (let block = 0; block < blocks; block++) {
    const started = performance.now();
    for (let call = 0; call < BLOCK; call++) await decide();
    times.push((performance.now() - started) / BLOCK);
  }
  return times.sort((a, b) => a - b)[blocks >> 1];
}

/** Of ONNX Runtime. */
export async function ofRuntime(ort, model, { dtype, shape, rows, blocks }) {
  const session = await ort.InferenceSession.create(model, { intraOpNumThreads: 1 });
  const size = rows * shape.reduce((product, axis) => product * axis, 1);
  const numbers = Array.from({ length: size }, (_, i) => (dtype === "uint8" ? i % 256 : Math.sin(i)));
  const data = (dtype === "uint8" ? Uint8Array : Float32Array).from(numbers);
  return median(() => session.run({ obs: new ort.Tensor(dtype, data, [rows, ...shape]) }, ["action"]), blocks);
}

/** Of a service, by the client: all rows in one message. */
export async function ofService({ FIRST, connect }, url, { rows: count, blocks }) {
  const game = await connect({ url, seats: count });
  const rows = game.rows([...Array(count).keys()]);
  rows.views.forEach(({ obs }, i) => obs.fill(i % 2));
  rows.flags.fill(FIRST);
  const found = await median(() => game.step(rows), blocks);
  game.close();
  return found;
}
