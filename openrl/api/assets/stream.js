// The live stream: server-sent events read with fetch, since EventSource can send no key.
// After a break it goes on from the last cursor; a server that has restarted says so in `hello`.

import { open } from "./api.js";

const SILENCE = 6000; // the server speaks each second

export class Stream {
  constructor({ event, state, refused }) {
    Object.assign(this, { event, state, refused });
    this.cursor = "";
    this.generation = 0;
  }

  start() {
    this.cursor = "";
    this.generation += 1;
    this.abort?.abort();
    this.#run(this.generation);
  }

  stop() {
    this.generation += 1;
    this.abort?.abort();
  }

  async #run(generation) {
    let wait = 250;
    while (generation === this.generation) {
      try {
        if (await this.#read(generation)) wait = 250;
      } catch (error) {
        if (error.status === 401 || error.status === 403) {
          if (generation === this.generation) this.refused(error.message);
          return;
        }
      }
      if (generation !== this.generation) return;
      this.state("reconnecting");
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, 4000);
    }
  }

  // Returns whether anything was read before the stream ended.
  async #read(generation) {
    const abort = new AbortController();
    this.abort = abort;
    let watch = setTimeout(() => abort.abort(), SILENCE);
    const headers = { Accept: "text/event-stream" };
    if (this.cursor) headers["Last-Event-ID"] = this.cursor;
    let heard = false;
    try {
      const response = await open("live", { headers, signal: abort.signal });
      if (!response.ok) {
        const answer = await response.json().catch(() => ({}));
        throw Object.assign(new Error(answer.detail ?? response.statusText), { status: response.status });
      }
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done || generation !== this.generation) return heard;
        clearTimeout(watch);
        watch = setTimeout(() => abort.abort(), SILENCE);
        rest += value;
        const frames = rest.split("\n\n");
        rest = frames.pop();
        frames.forEach((frame) => this.#frame(frame));
        if (!heard) this.state("live");
        heard = true;
      }
    } finally {
      clearTimeout(watch);
      abort.abort();
    }
  }

  #frame(frame) {
    const fields = {};
    for (const line of frame.split("\n")) {
      const colon = line.indexOf(": ");
      fields[line.slice(0, colon)] = line.slice(colon + 2);
    }
    if (fields.id) this.cursor = fields.id;
    if (fields.event) this.event(fields.event, JSON.parse(fields.data));
  }
}
