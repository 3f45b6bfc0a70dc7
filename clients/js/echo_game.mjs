// The echo game, by which `penstock check-client` proves a client (docs/games-protocol.md), for Node:
//
//   node echo_game.mjs HOST PORT [EPISODES]
//
// It plays whatever spaces the service has, without a clock and random numbers: what it shows is counted, and its
// rewards are checksums of the actions that it gets.

import { FIRST, Fault, TERMINATED, TRUNCATED, connect } from "./penstock.mjs";

const SEATS = 3;
const ARRAYS = { f4: Float32Array, f8: Float64Array, i1: Int8Array, u1: Uint8Array, i4: Int32Array, i8: BigInt64Array };

/** The spaces that are one array each, in the order of the columns. */
function leavesOf(space) {
  if (space.Dict) return space.Dict.flatMap(([, part]) => leavesOf(part));
  if (space.Tuple) return space.Tuple.flatMap(leavesOf);
  return [space];
}

/** For each column a function from v, a number of 0 to 96, and the place of an element in the column to its value. */
function columnsOf(welcome) {
  const spaces = leavesOf(welcome.observation);
  return welcome.row.map(([name, dtype, shape], i) => {
    const size = shape.reduce((product, axis) => product * axis, 1);
    const [kind] = Object.keys(spaces[i]);
    const [first, second] = [spaces[i][kind]].flat(1);
    const at = (bound, place) => (Array.isArray(bound) ? bound.flat(Infinity)[place] : bound);
    let value = (v) => v % 2;
    if (name === "action_mask") value = () => 1;
    else if (kind === "Discrete") value = (v) => second + (v % first);
    else if (kind === "MultiDiscrete") value = (v, place) => at(second, place) + (v % at(first, place));
    else if (kind === "Box" && /f\d/.test(dtype)) value = (v) => v / 97;
    else if (kind === "Box" && dtype !== "|b1") value = (v, place) => at(first, place) + (v % (at(second, place) - at(first, place) + 1));
    return { name, size, value, isLarge: /[iu]8/.test(dtype) };
  });
}

class Seat {
  episode = 0;
  isPlaying = false;
  actions = 0; // got in this episode
  rows = 0; // sent since the program began
  reward = 0;

  constructor(number) {
    this.number = number;
  }

  /** Write the next row of this seat. */
  write(rows, place, columns) {
    if (!this.isPlaying) {
      rows.flags[place] = FIRST;
      this.isPlaying = true;
      this.actions = 0;
    } else {
      rows.reward[place] = this.reward;
      if (this.actions === 3 + ((this.number + 2 * this.episode) % 5)) {
        rows.flags[place] = this.episode % 2 ? TRUNCATED : TERMINATED;
        this.isPlaying = false;
        this.episode += 1;
      }
    }
    let element = 0; // counted over all columns
    for (const { name, size, value, isLarge } of columns) {
      for (let i = 0; i < size; i++, element++) {
        const shown = value((31 * this.rows + 7 * this.number + 3 * element) % 97, i);
        rows.views[place][name][i] = isLarge ? BigInt(shown) : shown;
      }
    }
    this.rows += 1;
  }

  /** Take the row of bytes of an action: its checksum is the next reward. */
  take(bytes) {
    this.reward = bytes.reduce((checksum, byte) => (checksum * 33 + byte) % 1009, 0) / 1009;
    this.actions += 1;
  }

  /** End the episode that it is in, if it is in one. */
  giveUp() {
    if (this.isPlaying) this.episode += 1;
    this.isPlaying = false;
  }
}

/** The row of bytes that an action came in. */
function bytesOf(action, { action_row: [[, dtype]], action_nbytes: nbytes }) {
  const bytes = new Uint8Array(nbytes);
  const values = [action].flat();
  const isLarge = /[iu]8/.test(dtype);
  new ARRAYS[dtype.slice(1)](bytes.buffer, 0, values.length).set(isLarge ? values.map(BigInt) : values);
  return bytes;
}

async function play(game, episodes) {
  const columns = columnsOf(game.welcome);
  const seats = Array.from({ length: SEATS }, (_, number) => new Seat(number));
  const rowsOf = new Map(); // by their seats
  for (let round = 0; ; round++) {
    const playing = seats.filter((seat) => seat.episode < episodes).map((seat) => seat.number);
    if (playing.length === 0) return;

    // In each third round the last seat has a message of its own.
    const isTurn = round % 3 === 2;
    const parts = isTurn ? [playing.filter((seat) => seat !== 2), playing.filter((seat) => seat === 2)] : [playing];
    const steps = parts.filter((numbers) => numbers.length > 0).map((numbers) => {
      const key = numbers.join();
      if (!rowsOf.has(key)) rowsOf.set(key, game.rows(numbers));
      const rows = rowsOf.get(key);
      numbers.forEach((number, place) => seats[number].write(rows, place, columns));
      return { numbers, waits: numbers.map((number) => seats[number].isPlaying), answer: game.step(rows) };
    });
    const answers = await Promise.allSettled(steps.map(({ answer }) => answer));

    const lost = answers.find(({ status, reason }) => status === "rejected" && !(reason instanceof Fault));
    if (lost) {
      await game.reconnect(30);
      seats.forEach((seat) => seat.giveUp());
      continue;
    }
    steps.forEach(({ numbers, waits }, i) => {
      const actions = answers[i].value ?? answers[i].reason.actions;
      numbers.forEach((number, place) => {
        if (actions[place] !== null) seats[number].take(bytesOf(actions[place], game.welcome));
        else if (waits[place]) seats[number].giveUp();
      });
    });
  }
}

const [host, port, episodes = 20] = process.argv.slice(2);
const game = await connect({ url: `tcp://${host}:${port}`, seats: SEATS });
await play(game, Number(episodes));
game.close();
