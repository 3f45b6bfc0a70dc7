// Requests to the server that served this page; in a frozen page, answers of what it has embedded.

import { answerOf, embedded, frozen } from "./frozen.js";

let session = null;

export class Refused extends Error {}

async function answer(response) {
  const isJson = (response.headers.get("content-type") || "").startsWith("application/json");
  const body = isJson ? await response.json() : { error: (await response.text()).trim() };
  if (!response.ok) throw new Refused(body.error || `the server answered ${response.status}`);
  return body;
}

/** A view as JSON; lists among the parameters are repeated. */
export async function get(view, parameters = {}) {
  if (frozen) return answerOf(view, parameters);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined) query.append(name, each);
    }
  }
  return answer(await fetch(`api/${view}?${query}`, { signal: AbortSignal.timeout(30000) }));
}

/** The address of a video of a run, whose file was written at a time. */
export const videoAddress = (run, file, written) => (frozen ? embedded(run, file) : `video?${new URLSearchParams({ run, file, written })}`);

/** Give an order to a run, one of those of watch/orders.py. */
export async function order(kind, run) {
  if (frozen) throw new Refused("this is a file, which takes no orders");
  session = session || await get("session");
  return answer(await fetch(`order/${kind}`, {
    method: "POST",
    headers: { "content-type": "application/json", [session.header]: session.token },
    body: JSON.stringify({ run }),
  }));
}
