// What benchmarks/javascript_latency.py times in Node and in a page.

/** The median time of a decision in milliseconds: `decide` is called once, and then `calls` times. */
async function median(decide, calls) {
  await decide();
  const times = [];
  for (let call = 0; call < calls; call++) {
    const started = performance.now();
    await decide();
    times.push(performance.now() - started);
  }
  return times.sort((a, b) => a - b)[calls >> 1];
}

/** Of ONNX Runtime. */
export async function ofRuntime(ort, model, { dtype, shape, rows, calls }) {
  const session = await ort.InferenceSession.create(model, { intraOpNumThreads: 1 });
  const size = rows * shape.reduce((product, axis) => product * axis, 1);
  const numbers = Array.from({ length: size }, (_, i) => (dtype === "uint8" ? i % 256 : Math.sin(i)));
  const data = (dtype === "uint8" ? Uint8Array : Float32Array).from(numbers);
  return median(() => session.run({ obs: new ort.Tensor(dtype, data, [rows, ...shape]) }, ["action"]), calls);
}

/** Of a service, by the client: all rows in one message. */
export async function ofService({ FIRST, connect }, url, { rows: count, calls }) {
  const game = await connect({ url, seats: count });
  const rows = game.rows([...Array(count).keys()]);
  rows.views.forEach(({ obs }, i) => obs.fill(i % 2));
  rows.flags.fill(FIRST);
  const found = await median(() => game.step(rows), calls);
  game.close();
  return found;
}
