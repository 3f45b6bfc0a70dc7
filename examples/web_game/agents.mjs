// Two ways to ask the same agent: at `penstock serve`, or in this page by ONNX Runtime. Both take what each of their
// sides sees and resolve to an action for each. Neither knows the game.

import { FIRST, TERMINATED, connect } from "../../clients/js/penstock.mjs";

const RUNTIME = new URL("./node_modules/onnxruntime-web/dist/", import.meta.url);

/** The agent of a service: each side is a seat of one connection. */
export class ServedAgent {
  #connection;
  #rows;
  #begins = true;

  /**
   * @param {{url: string, token?: string}} address of the service
   * @param {number} sides how many sides it plays
   */
  static async connect({ url, token }, sides) {
    const agent = new ServedAgent();
    agent.#connection = await connect({ url, token: token || undefined, seats: sides, name: "Duel" });
    agent.#rows = agent.#connection.rows([...Array(sides).keys()]);
    return agent;
  }

  /** Called with the reason if the service leaves. */
  set onclose(listener) {
    this.#connection.onclose = listener;
  }

  /**
   * @param {number[][]} observations what each side sees
   * @param {number[]} rewards what its last action brought: the service has no use for it, a learner would
   * @returns {Promise<number[]>}
   */
  act(observations, rewards) {
    this.#write(observations, rewards, this.#begins ? FIRST : 0);
    this.#begins = false;
    return this.#connection.step(this.#rows);
  }

  /** Say how a match ended. The next observations begin another. */
  async end(observations, rewards) {
    if (this.#begins) return;
    this.#write(observations, rewards, TERMINATED);
    this.#begins = true;
    await this.#connection.step(this.#rows);
  }

  close() {
    this.#connection.close();
  }

  #write(observations, rewards, flag) {
    observations.forEach((observation, i) => this.#rows.views[i].obs.set(observation));
    this.#rows.reward.set(rewards);
    this.#rows.flags.fill(flag);
  }
}

/** The agent in this page: a file of `penstock export RUN policy.onnx`, computed by WebAssembly. */
export class PageAgent {
  #runtime;
  #session;

  /** @param {string} file address of the ONNX file */
  static async load(file) {
    const agent = new PageAgent();
    agent.#runtime = await import(new URL("ort.wasm.min.mjs", RUNTIME)).catch(() => {
      throw new Error("ONNX Runtime is missing; run npm ci --ignore-scripts in examples/web_game");
    });
    // More threads need pages with COOP and COEP headers, and gain nothing for a small network.
    agent.#runtime.env.wasm.numThreads = 1;
    agent.#runtime.env.wasm.wasmPaths = RUNTIME.href;

    const answer = await fetch(file);
    if (!answer.ok) throw new Error(`${file} is missing; run penstock export duel.safetensors duel.onnx in examples/web_game`);
    agent.#session = await agent.#runtime.InferenceSession.create(await answer.arrayBuffer());
    return agent;
  }

  onclose = null;

  /** As `ServedAgent.act`: one pass for all sides. */
  async act(observations) {
    const numbers = Float32Array.from(observations.flat());
    const obs = new this.#runtime.Tensor("float32", numbers, [observations.length, observations[0].length]);
    const { action } = await this.#session.run({ obs }, ["action"]);
    return Array.from(action.data, Number);
  }

  async end() {} // a network without memory has nothing to forget

  close() {
    this.#session.release();
  }
}
