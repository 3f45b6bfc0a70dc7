// Agent: videos with the decisions beside them, and evaluations.

import { get, order, videoAddress } from "./api.js";
import { Decisions } from "./decisions.js";
import { bytes, clock, count, date, fill, h, number, percent, setText, table } from "./dom.js";
import { frozen } from "./frozen.js";

export class AgentView {
  constructor(panel, { run }) {
    this.run = run;
    this.turns = 0;
    this.videos = h("div");
    this.evaluations = h("div");
    this.said = h("span.dim", { role: "status" });
    this.record = h("button", { type: "button", title: "An episode by the newest checkpoint, in a process beside the run", onclick: () => this.recordNow() }, "Record a video now");
    fill(panel, h("div.section", null, h("h2", null, "Videos"), this.record, this.said), this.videos, h("div.section", null, h("h2", { title: "± half the 95 % confidence interval of the mean" }, "Evaluations")), this.evaluations);
  }

  async update(now) {
    this.record.hidden = Boolean(frozen) || now.state !== "running"; // an order, which only a run in progress takes
    if (this.turns++ % 4 && now.state === "running") return;
    const found = await get("agent", { run: this.run });
    const text = JSON.stringify(found.videos);
    if (text !== this.drawn) {
      this.drawn = text;
      this.showVideos(found);
    }
    fill(this.evaluations, found.evaluations.length ? table([
      ["Trained steps", (row) => count(row.trained_steps), "num"], ["Time", (row) => clock(row.time_s), "num"],
      ["Greedy", (row) => spread(row.greedy), "num"], ["Sampled", (row) => spread(row.sampled), "num"],
      ["Better", (row) => row.play ?? ""],
      ...(found.evaluations.some((row) => row.win_rate !== null) ? [["Win rate", (row) => percent(row.win_rate), "num"]] : []),
      ["Lowest", (row) => number(row.return?.min), "num"], ["Highest", (row) => number(row.return?.max), "num"],
      ["Episodes", (row) => count(row.episodes), "num"], ["New best", (row) => (row.best ? "yes" : "no")],
    ], found.evaluations) : h("p.dim", null, found.why_none));
  }

  showVideos({ videos, record }) {
    if (!videos.length) {
      this.player = null;
      fill(this.videos, h("p.note", null, "The run has no video. One is recorded at each new best if the run has evaluations, eval.video is on, the environment can be shown and the extra video is installed; none in the first 10 s. By hand: ", h("code", null, record)));
      return;
    }
    if (!this.player) {
      this.player = { place: h("div.player"), decisions: h("div.decisions"), list: h("div") };
      fill(this.videos, h("div.two", null, this.player.place, this.player.decisions), this.player.list);
    }
    // A video that plays is replaced only where its file is.
    const same = videos.find((row) => row.file === this.shown?.file);
    if (!same || (same.written !== this.shown.written && this.shown.paused?.())) this.show(videos[0]);
    fill(this.player.list, table([
      ["Video", (row) => h("button.link", { type: "button", onclick: () => this.show(row) }, row.file)], ["Recorded", (row) => date(row.written), "nowrap"], ["Size", (row) => bytes(row.nbytes), "num"],
    ], videos));
    this.listed = videos;
    this.mark();
  }

  /** Mark the row of the video that is shown. */
  mark() {
    [...this.player.list.querySelectorAll("tbody tr")].forEach((row, i) => {
      const isShown = this.listed?.[i]?.file === this.shown?.file;
      row.classList.toggle("differs", isShown);
      if (isShown) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
    });
  }

  async show(row) {
    const { file, written } = row, name = `The agent plays: ${file}`, moves = file.endsWith(".gif");
    // The time of the file makes the address of another file another one.
    const src = videoAddress(this.run, file, written);
    const shown = moves ? h("img.gif", { src, alt: name }) : h("video", { src, controls: true, loop: true, muted: true, "aria-label": name });
    const about = h("p.dim"), mine = { file, written, paused: () => moves || shown.paused };
    this.shown = mine;
    this.mark();
    fill(this.player.place, shown, about);
    fill(this.player.decisions);
    let found = null;
    try { found = (await get("decisions", { run: this.run, file })).decisions; } catch { /* a video without them */ }
    if (this.shown !== mine) return;
    if (!found?.picture.length) {
      fill(this.player.decisions, h("p.dim", null, "No decisions are stored beside this video."));
      return;
    }
    const played = found.episodes.map(described).slice(0, 3);
    setText(about, [`${count(played.length)} ${played.length === 1 ? "episode" : "episodes"}`, ...played, found.sampled ? "sampled actions" : "greedy actions", found.trained_steps === null ? "" : `${count(found.trained_steps)} trained steps`].filter(Boolean).join(" · "));
    this.decisions = new Decisions(this.player.decisions, found, moves ? null : shown);
  }

  async recordNow() {
    this.record.disabled = true;
    setText(this.said, "recording …");
    try {
      const { file } = await order("record", this.run);
      setText(this.said, `${file} is recorded`);
      this.shown = null;
      this.turns = 0;
      this.drawn = null;
    } catch (error) { setText(this.said, error.message); }
    this.record.disabled = false;
  }
}

const described = (episode) => (episode.cut ? `cut after ${count(episode.length)} steps, return so far ${number(episode.return)}`
  : `return ${number(episode.return)} in ${count(episode.length)} steps`);

const spread = (about) => (about?.mean === null || about === undefined ? "–" : `${number(about.mean)}${about.half ? ` ± ${number(about.half)}` : ""}`);
