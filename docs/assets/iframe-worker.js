/* The search runs in a worker, and browsers refuse workers to pages that are opened from the disk.
 * There the worker's script runs in a hidden frame instead. Material's own shim for this is loaded
 * from the network, which the site must not need. */
(function () {
  "use strict";
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this._frame = document.createElement("iframe");
      this._frame.hidden = true;
      document.body.appendChild(this._frame);
      const inner = (this._inner = this._frame.contentWindow);
      inner.document.open();
      inner.document.write("<!doctype html><html><body></body></html>");
      inner.document.close();
      inner.postMessage = (data) => setTimeout(() => this._answer(data));
      inner.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => this._load(next)), Promise.resolve());
      this._ready = inner.importScripts(url);
    }

    postMessage(data) {
      const inner = this._inner;
      this._ready.then(() => inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this._frame.remove();
    }

    _answer(data) {
      const event = new MessageEvent("message", { data });
      if (this.onmessage) this.onmessage(event);
      this.dispatchEvent(event);
    }

    _load(url) {
      return new Promise((resolve, reject) => {
        const script = this._inner.document.createElement("script");
        script.src = new URL(url, document.baseURI).href;
        script.onload = resolve;
        script.onerror = reject;
        this._inner.document.body.appendChild(script);
      });
    }
  }

  window.Worker = window.IFrameWorker = IFrameWorker; // the search's script looks for the latter name
})();
