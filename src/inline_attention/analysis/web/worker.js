// Runs models by onnxruntime-web in a thread of its own, so that the page stays responsive.
"use strict";
const LONGEST_TIMING = 400; // milliseconds after which a run is not repeated
const MOST_RUNS = 9;
const sessions = new Map();
let ort;

const tasks = {
  async start({ source, binary }) {
    const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    ort = await import(address);
    URL.revokeObjectURL(address);
    ort.env.logLevel = "error";
    Object.assign(ort.env.wasm, { wasmBinary: binary, numThreads: 1, proxy: false });
  },

  async open({ name, graph, weights }) {
    const options = { executionProviders: ["wasm"], externalData: [{ path: "weights", data: weights }] };
    sessions.set(name, await ort.InferenceSession.create(graph, options));
  },

  async run({ name, values, shape, wanted, repeat }) {
    const images = new ort.Tensor("float32", values, shape);
    const times = [];
    let found;
    do {
      const start = performance.now();
      found = await sessions.get(name).run({ images }, wanted);
      times.push(performance.now() - start);
    } while (repeat && times.length < MOST_RUNS && times.reduce((sum, time) => sum + time) < LONGEST_TIMING);
    times.sort((a, b) => a - b);
    const outputs = {};
    for (const [key, tensor] of Object.entries(found)) outputs[key] = { values: tensor.data.slice(), shape: [...tensor.dims] };
    return { outputs, milliseconds: times[times.length >> 1] };
  },
};

onmessage = async ({ data: { number, task, content } }) => {
  try {
    postMessage({ number, result: await tasks[task](content) });
  } catch (error) {
    postMessage({ number, error: String(error?.message ?? error) });
  }
};
