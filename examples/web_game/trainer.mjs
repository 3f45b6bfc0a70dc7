// A worker that plays many matches at once for `penstock serve-env`, as fast as it answers. In the page itself, drawing
// and a hidden tab would slow it down.
//
// It gets {url, token, matches, rival}, and posts {decisions, returns}, {message} and {failure}.

import { FIRST, Fault, TERMINATED, TRUNCATED, connect } from "../../clients/js/penstock.mjs";
import { ACTION, OBSERVATION, Practice, RIVALS } from "./practice.mjs";

const REPORT_MS = 200;
const SHORTEST_PAUSE_MS = 100, LONGEST_PAUSE_MS = 5000; // between attempts to connect

let decisions = 0;
let returns = []; // of the matches that have ended since the last report

onmessage = async ({ data }) => {
  setInterval(report, REPORT_MS);
  const matches = Array.from({ length: data.matches }, () => new Practice(RIVALS[data.rival]));
  let pause = SHORTEST_PAUSE_MS;
  for (;;) {
    try {
      const game = await connect({
        url: data.url, token: data.token || undefined, seats: matches.length,
        observation: OBSERVATION, action: ACTION, name: "Duel",
      });
      postMessage({ message: game.welcome.learns ? "" : "This service plays but does not learn: start penstock serve-env." });
      pause = SHORTEST_PAUSE_MS;
      // While the service decides for one half, the other half moves.
      const middle = matches.length >> 1;
      await Promise.all([play(game, matches, 0, middle), play(game, matches, middle, matches.length)]);
    } catch (error) {
      // Refused for what the page is, it is refused again.
      if (error instanceof Fault && error.field !== "connection") return postMessage({ failure: error.message });
      postMessage({ message: `${error.message}. The page goes on trying.` });
    }
    await new Promise((resolve) => { setTimeout(resolve, pause); });
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
};

/** Play matches `start` to `stop` - 1, each at the seat of its number, until the service leaves. */
async function play(game, matches, start, stop) {
  const seats = [...Array(stop - start).keys()].map((i) => start + i);
  if (seats.length === 0) return;
  const rows = game.rows(seats);
  const own = matches.slice(start, stop);
  own.forEach((match) => match.begin());
  rows.flags.fill(FIRST);
  for (;;) {
    own.forEach((match, i) => rows.views[i].obs.set(match.observe()));
    const actions = await game.step(rows).catch((error) => {
      if (error instanceof Fault && error.seat !== null) return error.actions;
      throw error;
    });
    own.forEach((match, i) => {
      // A row that has ended a match gets no action, nor does one at fault; the next one begins another.
      if (actions[i] === null) {
        match.begin();
        rows.flags[i] = FIRST;
        return;
      }
      rows.reward[i] = match.step(actions[i]);
      decisions += 1;
      if (match.isOver) rows.flags[i] = TERMINATED;
      else if (match.isCut) rows.flags[i] = TRUNCATED;
      if (match.isOver || match.isCut) returns.push(match.return);
    });
  }
}

function report() {
  postMessage({ decisions, returns });
  returns = [];
}
