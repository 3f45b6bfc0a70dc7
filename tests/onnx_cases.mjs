// Computes the cases of tests/onnx_cells.py by ONNX Runtime, in Node (onnxruntime-node) or in a page (onnxruntime-web).

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, uint8: Uint8Array, int32: Int32Array, int64: BigInt64Array,
  bool: Uint8Array,
};

/**
 * Run a policy over its cases, which are steps in a row: what a recurrent network remembers goes from each into the next.
 * @param {object} ort the module of ONNX Runtime
 * @param {Uint8Array} model the file
 * @param {{inputs: Record<string, Encoded>, outputs: Record<string, Encoded>}[]} cases
 * @typedef {{dtype: string, shape: number[], data: number[]}} Encoded
 * @returns {Promise<{values: number, excess: number}>} how many values were compared, and the largest
 *   |difference| - 1e-5 - 1e-5 |expected|: not above 0 where all agree.
 */
export async function compare(ort, model, cases) {
  const session = await ort.InferenceSession.create(model);
  let values = 0, excess = -Infinity, previous = null;
  for (const { inputs, outputs } of cases) {
    const feeds = Object.fromEntries(Object.entries(inputs).map(([name, array]) => [name, tensor(ort, array)]));
    if (feeds.state && previous) feeds.state = previous.state_out;
    const computed = await session.run(feeds);
    previous = computed;
    for (const [name, expected] of Object.entries(outputs)) {
      if (computed[name].data.length !== expected.data.length) throw new Error(`${name} has ${computed[name].data.length} values`);
      expected.data.forEach((value, i) => {
        // NaN would make every comparison false.
        const difference = Math.abs(Number(computed[name].data[i]) - value);
        excess = Number.isNaN(difference) ? Infinity : Math.max(excess, difference - 1e-5 - 1e-5 * Math.abs(value));
        values += 1;
      });
    }
  }
  return { values, excess };
}

function tensor(ort, { dtype, shape, data }) {
  const convert = dtype === "int64" ? BigInt : Number;
  return new ort.Tensor(dtype, ARRAYS[dtype].from(data, convert), shape);
}
