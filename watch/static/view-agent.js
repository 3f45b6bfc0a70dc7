// Agent: videos and evaluations.

import { get, videoAddress } from "./api.js";
import { bytes, clock, count, date, fill, h, number, table } from "./dom.js";

export class AgentView {
  constructor(panel, { run }) {
    this.run = run;
    this.turns = 0;
    this.videos = h("div");
    this.evaluations = h("div");
    fill(panel, h("div.section", null, h("h2", null, "Videos")), this.videos, h("div.section", null, h("h2", null, "Evaluations")), this.evaluations);
  }

  async update(now) {
    if (this.turns++ % 4 && now.state === "running") return;
    const found = await get("agent", { run: this.run });
    const text = JSON.stringify(found.videos);
    if (text !== this.drawn) { // a video that plays is not replaced
      this.drawn = text;
      fill(this.videos, found.videos.length ? this.player(found.videos)
        : h("p.note", null, "The run has no video. Record one: ", h("code", null, found.record)));
    }
    fill(this.evaluations, found.evaluations.length ? table([
      ["Trained steps", (row) => count(row.trained_steps), "num"], ["Time", (row) => clock(row.time_s), "num"],
      ["Greedy", (row) => spread(row.greedy), "num"], ["Sampled", (row) => spread(row.sampled), "num"],
      ["Better", (row) => row.play ?? ""], ["Lowest", (row) => number(row.return?.min), "num"], ["Highest", (row) => number(row.return?.max), "num"],
      ["Episodes", (row) => count(row.episodes), "num"], ["", (row) => (row.best ? "best so far" : "")],
    ], found.evaluations) : h("p.dim", null, found.why_none));
  }

  player(videos) {
    const address = (file) => videoAddress(this.run, file);
    const place = h("div");
    const show = (file) => fill(place, file.endsWith(".gif") ? h("img.gif", { src: address(file), alt: `The agent plays: ${file}` })
      : h("video", { src: address(file), controls: true, loop: true, muted: true, "aria-label": `The agent plays: ${file}` }));
    show(videos[0].file);
    return h("div.two", null, place, table([
      ["Video", (row) => h("button.link", { type: "button", onclick: () => show(row.file) }, row.file)], ["Recorded", (row) => date(row.written), "nowrap"], ["Size", (row) => bytes(row.nbytes), "num"],
    ], videos));
  }
}

const spread = (about) => (about?.mean === null || about === undefined ? "–" : `${number(about.mean)}${about.se ? ` ± ${number(about.se)}` : ""}`);
