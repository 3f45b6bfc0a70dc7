// A game's end of `penstock serve`, for browsers and Node, without dependencies (docs/games-protocol.md).
//
//   const game = await connect({ url: "tcp://127.0.0.1:8800", seats: 2 });
//   const rows = game.rows([0, 1]);                 // a row of each seat, made once
//   for (;;) {
//     rows.views[0].obs.set(seen);                  // typed arrays into the message itself
//     rows.flags[0] = FIRST;                        // where an episode begins
//     const [action, other] = await game.step(rows);
//   }

/** Flags of a row: the seat begins an episode; it has ended; it was cut; the seat is gone. */
export const FIRST = 1, TERMINATED = 2, TRUNCATED = 4, LEAVES = 8;

const ENDED = TERMINATED | TRUNCATED | LEAVES;
const PROTOCOL = 1;
const HELLO = 1, WELCOME = 2, STEP = 3, ACT = 4, FAULT = 5, END = 6;
const MOST_NBYTES = 16 * 2 ** 20; // of a message
const FIRST_PAUSE_MS = 100, LONGEST_PAUSE_MS = 5000; // between attempts to connect again
// All numbers of the protocol are little-endian, as are typed arrays wherever browsers and Node run.
const ARRAYS = {
  f4: Float32Array, f8: Float64Array, i1: Int8Array, u1: Uint8Array, b1: Uint8Array, i2: Int16Array, u2: Uint16Array,
  i4: Int32Array, u4: Uint32Array, i8: BigInt64Array, u8: BigUint64Array,
};
const encoder = new TextEncoder(), decoder = new TextDecoder();
const aligned = (nbytes, to) => Math.ceil(nbytes / to) * to;

/**
 * A name, dtype, shape and offset in bytes of an array in each row.
 * @typedef {[name: string, dtype: string, shape: number[], offset: number]} Column
 *
 * What the service says of itself and of its policy.
 * @typedef {{protocol: number, observation: object, action: object, row: Column[], row_nbytes: number,
 *   action_row: Column[], action_nbytes: number, seats: number, learns: boolean,
 *   policy: {run: string, env: string, play: "greedy" | "sampled"}}} Welcome
 *
 * A number for a discrete action, otherwise the action's values in a row.
 * @typedef {number | number[]} Action
 */

/** A seat, or with seat null the connection, was refused. The seat must begin a new episode; the others go on. */
export class Fault extends Error {
  /** @param {{seat: number | null, field: string, error: string}} fault */
  constructor({ seat, field, error }) {
    super(seat === null ? error : `seat ${seat}: ${error}`);
    this.name = "Fault";
    /** @type {number | null} */
    this.seat = seat;
    /** @type {string} What was wrong: "observation", "reward", "seat", "token" ... */
    this.field = field;
    /** @type {(Action | null)[]} Of a step: what its other rows were answered. */
    this.actions = [];
  }
}

/**
 * Connect to a service.
 *
 * @param {object} options
 * @param {string} options.url "ws://HOST:PORT/play" or "wss://...", in Node also "tcp://HOST:PORT" and "tls://...".
 * @param {number} [options.seats] how many episodes this connection plays at a time.
 * @param {string} [options.token] the token of the service, if it has one.
 * @param {object} [options.observation] the space that the game shows, as in WELCOME; another policy's is refused.
 * @param {object} [options.action] the space of the actions that it takes, likewise.
 * @param {number[]} [options.sides] in a game of several sides, the side of each seat of one game, such as [0, 1].
 * @param {string} [options.name] of the game, for messages of the service.
 * @param {number} [options.waitS] how many seconds to try until a service is there; once by default.
 * @returns {Promise<Connection>} rejects with a Fault if the service refuses, with an Error if nobody answers.
 */
export async function connect({ url, seats = 1, token, observation, action, sides, name, waitS = 0 }) {
  if (!/^(wss?|tcp|tls):/.test(url)) throw new Error(`${url} is no address of a service; give ws://, wss://, tcp:// or tls://`);
  const connection = new Connection(url, { protocol: PROTOCOL, seats, token, observation, action, sides, name });
  await connection.reconnect(waitS);
  return connection;
}

/** Rows of a STEP, of the same seats each time. What is written into them is what is sent. */
export class Rows {
  /**
   * Made by `Connection.rows`.
   * @param {number[]} seats
   * @param {Welcome} welcome
   */
  constructor(seats, welcome) {
    const strange = seats.find((seat, i) => !(seat >= 0 && seat < welcome.seats) || seats.indexOf(seat) !== i);
    if (strange !== undefined)
      throw new RangeError(`seat ${strange} is used twice or not one of 0 to ${welcome.seats - 1}; ask connect for more seats`);

    const count = seats.length;
    const flagsAt = 8 + 4 * count;
    const rewardAt = aligned(flagsAt + count, 4);
    const rowsAt = aligned(rewardAt + 4 * count, 8);
    /** @type {ArrayBuffer} the message. */
    this.buffer = new ArrayBuffer(rowsAt + count * welcome.row_nbytes);
    /** @type {readonly number[]} */
    this.seats = [...seats];
    /** @type {Uint8Array} flags of each row, 0 again after each step. */
    this.flags = new Uint8Array(this.buffer, flagsAt, count);
    /** @type {Float32Array} what the last action of each row's seat brought, 0 again after each step. */
    this.reward = new Float32Array(this.buffer, rewardAt, count);
    /** @type {Record<string, any>[]} of each row, typed arrays by their names; "obs" if there is one alone. */
    this.views = seats.map((_, i) => views(this.buffer, rowsAt + i * welcome.row_nbytes, welcome.row));
    new Uint32Array(this.buffer, 0, 2).set([STEP, count]);
    new Uint32Array(this.buffer, 8, count).set(seats);
  }
}

/** A connection, made by `connect`. */
export class Connection {
  #url;
  #hello;
  #link = null;
  #opening = null;
  #steps = new Map(); // of each seat that waits for its action: its step, and its place there

  constructor(url, hello) {
    this.#url = url;
    this.#hello = hello;
    /** @type {Welcome} */
    this.welcome = null;
    /** @type {number} seats 0 ... seats - 1 may play. */
    this.seats = 0;
    /** @type {((reason: Error) => void) | null} called once when the service closes the connection, or it breaks. */
    this.onclose = null;
  }

  /** Connect once. Rejects as `connect` does. */
  async #open() {
    const link = await (this.#url.startsWith("ws") ? openWebSocket : openSocket)(this.#url);
    this.#link = link;
    return new Promise((resolve, reject) => {
      this.#opening = { resolve, reject };
      link.send(message(HELLO, this.#hello));
      // What an earlier link still brings, such as its end, is not of this one.
      const ofThis = (handle) => (content) => { if (this.#link === link) handle(content); };
      link.listen(ofThis((bytes) => this.receive(bytes)), ofThis((reason) => this.lost(reason)));
    });
  }

  /**
   * Connect again after the service has gone, with growing pauses. All seats must begin new episodes; rows that were
   * made before remain valid.
   * @param {number} [waitS] how many seconds to try; for ever by default.
   * @returns {Promise<void>} rejects with a Fault if the service refuses this game, as it may be another one, and with
   *   the last Error when the time is over.
   */
  async reconnect(waitS = Infinity) {
    const until = performance.now() + 1000 * waitS;
    this.#end(new Error("the connection was closed"));
    for (let pause = FIRST_PAUSE_MS; ; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      try {
        return await this.#open();
      } catch (error) {
        const isRefused = error instanceof Fault && error.field !== "connection"; // there may be room later
        if (isRefused || performance.now() + pause > until) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  /**
   * Make the rows of some seats, to be used for step after step.
   * @param {number[]} seats
   */
  rows(seats) {
    return new Rows(seats, this.welcome);
  }

  /**
   * Send what the seats of `rows` see. Steps of other seats may be sent meanwhile.
   * @param {Rows} rows
   * @returns {Promise<(Action | null)[]>} the action of each row, null where the episode has ended. Rejects with a
   *   Fault, once the other rows are answered, if a seat was refused, and with an Error if the connection is lost.
   */
  async step(rows) {
    if (!this.#link) throw new Error("the connection is closed; connect again, and begin new episodes");
    const waits = rows.seats.find((seat) => this.#steps.has(seat));
    if (waits !== undefined) throw new Error(`seat ${waits} waits for its action; await the step before the next`);

    const answered = new Promise((resolve, reject) => {
      const step = { actions: rows.seats.map(() => null), missing: 0, fault: null, resolve, reject };
      rows.seats.forEach((seat, at) => {
        // A row that has ended gets no action; only a fault could answer it, so nothing waits.
        if (rows.flags[at] & ENDED) return;
        this.#steps.set(seat, { step, at });
        step.missing += 1;
      });
      if (step.missing === 0) resolve(step.actions);
    });
    this.#link.send(rows.buffer);
    rows.flags.fill(0);
    rows.reward.fill(0);
    return answered;
  }

  /** Leave. The service closes every seat. */
  close(reason = "the game is over") {
    this.#link?.send(message(END, { reason }));
    this.#end(new Error("the connection was closed"));
  }

  /** Handle a message: `connect` passes each one here. */
  receive(bytes) {
    try {
      this.#handle(bytes);
    } catch (error) {
      this.lost(new Error(`the service sent what cannot be read (${error.message}); is it penstock serve?`));
    }
  }

  /** Handle the end of the connection: whatever waits is rejected with the reason. */
  lost(reason) {
    if (!this.#link) return;
    this.#end(reason);
    this.onclose?.(reason);
  }

  #handle(bytes) {
    const [kind] = new Uint32Array(bytes, 0, 1);
    if (kind === ACT) return this.#act(bytes);
    const body = JSON.parse(decoder.decode(new Uint8Array(bytes, 4)));
    if (kind === WELCOME) {
      const layout = ({ row, row_nbytes, action_row, action_nbytes }) => JSON.stringify([row, row_nbytes, action_row, action_nbytes]);
      if (this.welcome && layout(this.welcome) !== layout(body))
        return this.lost(new Fault({ seat: null, field: "observation", error: "the service has other spaces than before; start anew" }));
      this.welcome = body;
      this.seats = body.seats;
      this.#opening.resolve();
    }
    if (kind === FAULT && body.seat !== null) this.#settle(body.seat, null, new Fault(body));
    if (kind === FAULT && body.seat === null) this.lost(new Fault(body));
    if (kind === END) this.lost(new Error(body.reason));
  }

  #act(bytes) {
    const { action_row: columns, action_nbytes: nbytes } = this.welcome;
    const [, count] = new Uint32Array(bytes, 0, 2);
    const seats = new Uint32Array(bytes, 8, count);
    const rowsAt = aligned(8 + 4 * count, 8);
    for (let i = 0; i < count; i++) {
      const { action } = views(bytes, rowsAt + i * nbytes, columns);
      const values = Array.from(action, Number);
      this.#settle(seats[i], columns[0][2].length === 0 ? values[0] : values, null);
    }
  }

  /** Answer the row of a seat by an action or a fault; its step ends when it was the last one. */
  #settle(seat, action, fault) {
    if (!this.#steps.has(seat)) return; // a fault of a row that had ended
    const { step, at } = this.#steps.get(seat);
    this.#steps.delete(seat);
    step.actions[at] = action;
    step.fault ??= fault;
    step.missing -= 1;
    if (step.missing > 0) return;

    if (step.fault) step.reject(Object.assign(step.fault, { actions: step.actions }));
    else step.resolve(step.actions);
  }

  #end(reason) {
    this.#link?.close();
    this.#link = null;
    this.#opening?.reject(reason);
    const steps = new Set([...this.#steps.values()].map(({ step }) => step));
    this.#steps.clear();
    steps.forEach((step) => step.reject(reason));
  }
}

/** Typed arrays over a row, by the names of its columns. */
function views(buffer, rowAt, columns) {
  return Object.fromEntries(columns.map(([name, dtype, shape, offset]) => {
    const TypedArray = ARRAYS[dtype.replace(/^[<|=]/, "")];
    if (!TypedArray) throw new Error(`${name} has the dtype ${dtype}, which JavaScript has no array of`);
    return [name, new TypedArray(buffer, rowAt + offset, shape.reduce((size, axis) => size * axis, 1))];
  }));
}

function message(kind, body) {
  const text = encoder.encode(JSON.stringify(body));
  const bytes = new Uint8Array(4 + text.length);
  new Uint32Array(bytes.buffer, 0, 1)[0] = kind;
  bytes.set(text, 4);
  return bytes.buffer;
}

/** A link sends messages, and after `listen` passes on those that arrive, and the error that ends it. */
function openWebSocket(url) {
  return new Promise((resolve, reject) => {
    if (!globalThis.WebSocket) throw new Error("this Node has no WebSocket; connect to tcp://HOST:PORT instead");
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    // A browser does not say whether nobody listens or this page's origin was refused.
    const origin = globalThis.location ? ` with --origin ${location.origin}` : "";
    socket.onerror = () => reject(new Error(`${url} does not answer; start penstock serve or serve-env there${origin}`));
    socket.onopen = () => resolve({
      send: (buffer) => socket.send(buffer),
      close: () => socket.close(),
      listen: (onmessage, onlost) => {
        socket.onmessage = (event) => onmessage(event.data);
        socket.onclose = (event) => onlost(new Error(event.reason || "the connection was lost"));
      },
    });
  });
}

async function openSocket(url) {
  const { protocol, hostname, port } = new URL(url);
  const host = hostname.replace(/^\[|\]$/g, "");
  const isSecure = protocol === "tls:";
  const { connect: dial } = await import(isSecure ? "node:tls" : "node:net");
  const { isIP } = await import("node:net");
  return new Promise((resolve, reject) => {
    const socket = dial({ host, port: Number(port), servername: isIP(host) ? undefined : host });
    socket.setNoDelay(true);
    let failure = new Error("the connection was lost");
    socket.on("error", (error) => {
      failure = error;
      reject(new Error(`${url}: ${error.message}; start penstock serve or serve-env there`));
    });
    socket.once(isSecure ? "secureConnect" : "connect", () => resolve({
      send: (buffer) => {
        // A copy, as rows are written anew before a busy socket has sent them.
        const framed = Buffer.alloc(4 + buffer.byteLength);
        framed.writeUInt32LE(buffer.byteLength);
        framed.set(new Uint8Array(buffer), 4);
        socket.write(framed);
      },
      close: () => socket.end(),
      listen: (onmessage, onlost) => {
        const cut = framing(onmessage);
        socket.on("data", (chunk) => {
          try {
            cut(chunk);
          } catch (error) {
            socket.destroy(error);
          }
        });
        socket.on("close", () => onlost(failure));
      },
    }));
  });
}

/** Returns a function that takes the chunks of a stream and passes on each whole message, in memory of its own. */
function framing(onmessage) {
  let waiting = [], nbytes = 0, wanted = 4;
  return (chunk) => {
    waiting.push(chunk);
    nbytes += chunk.length;
    if (nbytes < wanted) return;

    const bytes = Buffer.concat(waiting, nbytes);
    let at = 0;
    wanted = 4;
    while (bytes.length - at >= 4) {
      const length = bytes.readUInt32LE(at);
      if (length < 4 || length > MOST_NBYTES) throw new Error(`a message of ${length} bytes; is it penstock serve?`);
      wanted = 4 + length;
      if (bytes.length - at < wanted) break;
      onmessage(new Uint8Array(bytes.subarray(at + 4, at + wanted)).buffer);
      at += wanted;
      wanted = 4;
    }
    waiting = [bytes.subarray(at)];
    nbytes = bytes.length - at;
  };
}
